"""A model's own defaults: how its answers are sampled, and which tokens end them."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from typing import Any, Final

log = logging.getLogger(__name__)

# Defaults of generation_config.json that this version can honour, and what the API allows of
# them; and those that it cannot yet, with their neutral value.
DEFAULTS_NOW: Final = {
    "temperature": (0.0, math.inf),
    "top_p": (sys.float_info.min, 1.0),
    "top_k": (0, math.inf),
    "min_p": (0.0, 1.0),
}
DEFAULTS_LATER: Final = {"repetition_penalty": 1.0}


def eos_token_ids(own: int | None, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokenizer's EOS and those of the generation config (of the model's, where it has none).

    transformers' `generate` knows only the latter; a chat model's tokenizer often knows the token
    that ends a turn where its generation config names only the one that ends a text.
    """
    listed = config.get("eos_token_id")
    ids = listed if isinstance(listed, list) else [listed]
    return tuple(sorted({token_id for token_id in [own, *ids] if token_id is not None}))


def default_sampling(config: Mapping[str, Any]) -> dict[str, float | int]:
    """The values that the file states; transformers' own defaults are none of the model's."""
    for name, neutral in DEFAULTS_LATER.items():
        if config.get(name) not in (None, neutral):
            log.warning(
                "the model's generation config asks for %s %s, which this version does not have: "
                "requests that leave it unset run with %s",
                name,
                config[name],
                neutral,
            )
    return {
        name: config[name]
        for name, (minimum, maximum) in DEFAULTS_NOW.items()
        if isinstance(config.get(name), int | float) and minimum <= config[name] <= maximum
    }
