"""A model's own defaults: how its answers are sampled, and which tokens end them.

They come from generation_config.json, config.json and the tokenizer. Each value is read as it is
meant, or the model is refused by key and value: half a configuration would answer differently from
what the model's makers state, and nobody would know. What this version cannot do at all (`_LATER`,
a repetition penalty for one) does not keep a model from being served; the log names it.

What is read in another way than it is written:
  * integral floats are integers (`top_k: 20.0`);
  * top_k -1 is off, as some files say it, and a top_k beyond the API's integers is off too;
  * a temperature below what requests may ask for is greedy, and so is `do_sample: false`;
  * top_p 0 keeps the most probable token, as transformers reads it.
What the file does not state is left to the API's neutral values, not to transformers' defaults.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

log = logging.getLogger(__name__)

GREEDY_BELOW: Final = 1e-6  # temperatures under it are greedy; requests may not ask for them
SMALLEST_TOP_P: Final = 1e-6  # keeps one token
_MAX_INT32: Final = (1 << 31) - 1
_MAX_FLOAT32: Final = 3.4e38

# What changes answers in transformers and cannot be had here yet, with its neutral values.
_LATER: Final[Mapping[str, tuple[object, ...]]] = {
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "length_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
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
    """What generation_config.json states of temperature, top_p, top_k and min_p, each within the
    API's range. Raises ValueError for what cannot be read."""
    for key, neutral in _LATER.items():
        if config.get(key) is not None and config[key] not in neutral:
            log.warning(
                "generation_config.json asks for %s %s, which this version does not have: answers "
                "are made without it",
                key,
                _short(config[key]),
            )
    defaults: dict[str, float | int] = {
        key: read(key, config[key]) for key, read in _READ.items() if config.get(key) is not None
    }
    do_sample = config.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise _refused("do_sample", do_sample, "true, false or null")
    if do_sample is False:
        defaults["temperature"] = 0.0
    return defaults


def _temperature(key: str, value: object) -> float:
    number = _number(key, value, 0.0, _MAX_FLOAT32)
    return 0.0 if number < GREEDY_BELOW else number


def _top_p(key: str, value: object) -> float:
    return max(SMALLEST_TOP_P, _number(key, value, 0.0, 1.0))


def _top_k(key: str, value: object) -> int:
    number = _integer(value)
    if number is None or number < -1:
        raise _refused(key, value, "an integer of at least 0; 0 and -1 are off")
    return 0 if number == -1 or number > _MAX_INT32 else number


def _min_p(key: str, value: object) -> float:
    return _number(key, value, 0.0, 1.0)


_READ: Final[Mapping[str, Callable[[str, object], float | int]]] = {
    "temperature": _temperature,
    "top_p": _top_p,
    "top_k": _top_k,
    "min_p": _min_p,
}


def _number(key: str, value: object, minimum: float, maximum: float) -> float:
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
