"""A model's own defaults: how its answers are sampled, and which tokens end them.

They come from generation_config.json, config.json and the tokenizer. A value that cannot be read
refuses the model by key and value: with half a configuration it would answer differently from what
its makers state, and nobody would know. Unsupported settings (`_UNSUPPORTED`, such as a repetition
penalty) do not keep a model from being served; a warning names them.

Values with a lenient reading:
  * integral floats are integers (`top_k: 20.0`);
  * top_k -1 is off, as some files have it, and so is a top_k beyond the API's integers;
  * a temperature below the API's minimum is greedy, and so is `do_sample: false`;
  * top_p 0 keeps the most probable token, as in transformers.
Missing values are the API's neutral ones, not transformers' defaults.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Final

from protos.sampling import MIN_TEMPERATURE, SAMPLER_FIELDS, SamplingField

logger = logging.getLogger(__name__)

SMALLEST_TOP_P: Final = 1e-6  # keeps one token
_MAX_INT32: Final = (1 << 31) - 1
_MAX_FLOAT32: Final = 3.4e38

# Keys that change answers in transformers and are not supported here, with their neutral values.
_UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "encoder_repetition_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "typical_p": (1.0,),
    "top_h": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
}


def eos_token_ids(
    own: object, generation_config: Mapping[str, Any], model_config: Mapping[str, Any]
) -> tuple[int, ...]:
    """The tokenizer's EOS, and those of generation_config.json; where that names none, those of
    config.json, which holds them under text_config in models of more than text.

    The tokenizer's always counts: a chat model's tokenizer often knows the token that ends a turn
    where the other files name only the one that ends a text. config.json does not count beside
    generation_config.json: many name there what their class has by default, an ordinary token.

    Raises ValueError for what is not a token id.
    """
    ids = _token_ids("generation_config.json", "eos_token_id", generation_config)
    if not ids:
        ids = _token_ids("config.json", "eos_token_id", model_config)
    text_config = model_config.get("text_config")
    if not ids and isinstance(text_config, dict):
        ids = _token_ids("config.json: text_config", "eos_token_id", text_config)
    ids += _token_ids("the tokenizer", "eos_token_id", {"eos_token_id": own})
    return tuple(sorted(set(ids)))


def default_sampling(config: Mapping[str, Any]) -> dict[str, float | int]:
    """The sampler parameters that generation_config.json states, each within the API's range.
    Raises ValueError for what cannot be read."""
    for key, neutral in _UNSUPPORTED.items():
        if config.get(key) is not None and config[key] not in neutral:
            logger.warning(
                "generation_config.json sets %s to %s, which is not supported: answers are made "
                "without it",
                key,
                _short(config[key]),
            )
    defaults: dict[str, float | int] = {}
    for name, entry in SAMPLER_FIELDS.items():
        key = entry.config_key
        if config.get(key) is not None:
            read = _count if entry.dtype == "int32" else _number
            defaults[name] = _nearest_allowed(name, read(key, config[key], entry))
    do_sample = config.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise _refused("do_sample", do_sample, "true, false or null")
    if do_sample is False:
        defaults["temperature"] = 0.0
    return defaults


def _nearest_allowed(name: str, number: float) -> float:
    """What a request would have to say for a number that it may not."""
    if name == "temperature" and number < MIN_TEMPERATURE:
        return 0.0
    return max(SMALLEST_TOP_P, number) if name == "top_p" else number


def _count(key: str, value: object, _: SamplingField) -> int:
    number = _integer(value)
    if number is None or number < -1:
        raise _refused(key, value, "an integer of at least 0; 0 and -1 are off")
    return 0 if number == -1 or number > _MAX_INT32 else number


def _number(key: str, value: object, entry: SamplingField) -> float:
    minimum = 0.0 if entry.allows_zero else entry.minimum
    maximum = min(entry.maximum, _MAX_FLOAT32)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not minimum <= value <= maximum:  # type: ignore[operator]
        raise _refused(key, value, f"a number from {minimum:g} to {maximum:g}, or null")
    return float(value)  # type: ignore[arg-type]


def _integer(value: object) -> int | None:
    """Of an integer, or of a float that is one."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _token_ids(file: str, key: str, config: Mapping[str, Any]) -> list[int]:
    """A token id, a list of them, or none: null, -1 or an empty list."""
    stated = config.get(key)
    ids = []
    for value in stated if isinstance(stated, list) else [stated]:
        token_id = _integer(value)
        if value is not None and (token_id is None or not -1 <= token_id <= _MAX_INT32):
            allowed = f"a token id from 0 to {_MAX_INT32}, a list of them, or null"
            raise _refused(key, stated, allowed, file)
        if token_id is not None and token_id >= 0:
            ids.append(token_id)
    return ids


def _refused(
    key: str, value: object, allowed: str, file: str = "generation_config.json"
) -> ValueError:
    return ValueError(f"{file}: {key} is {_short(value)}; allowed: {allowed}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}… ({len(text)} characters)"
