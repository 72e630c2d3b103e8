"""A model's own defaults: how its answers are sampled, and which tokens end them.

They come from generation_config.json, config.json and the tokenizer. A value that cannot be read
refuses the model by key and value: with half a configuration it would answer differently from what
its makers state, and nobody would know. Settings without a counterpart in the API
(`_WITHOUT_COUNTERPART`) do not keep a model from being served; a warning names them.

Values with a lenient reading:
  * integral floats are integers (`top_k: 20.0`);
  * top_k -1 is off, as some files have it, and so is a top_k beyond the API's integers;
  * a temperature below the API's minimum is greedy, and so is `do_sample: false`;
  * top_p 0 keeps the most probable token, as in transformers;
  * `early_stopping: "never"` is false.
Missing values are the API's neutral ones, not transformers' defaults. Not read: max_new_tokens and
max_length, as an unset max_tokens means as many as fit; and num_beams, as a client that did not ask
for a beam search expects its answer to stream.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from protos.sampling import MIN_TEMPERATURE, SAMPLING_FIELDS, SamplingField

logger = logging.getLogger(__name__)

_FILE: Final = "generation_config.json"
SMALLEST_TOP_P: Final = 1e-6  # keeps one token
MAX_BANNED: Final = 4096  # bad_words_ids, suppress_tokens and biases of a model: each
_DIGITS: Final = re.compile(r"\d{1,10}")
_MAX_INT32: Final = (1 << 31) - 1
_MAX_FLOAT32: Final = 3.4e38

# Keys that change answers in transformers and have no effect here, with their neutral values.
_WITHOUT_COUNTERPART: Final[Mapping[str, tuple[object, ...]]] = {
    "num_beams": (1,),
    "encoder_repetition_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1.0,),
    "top_h": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
}


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """How a model's answers are sampled where a request leaves it open."""

    numbers: Mapping[str, float | int] = field(default_factory=dict)  # by field of SamplingParams
    min_length: int = 0  # tokens of prompt and answer together, unless min_tokens is stated
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences never completed


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
    ids = _token_ids(_FILE, "eos_token_id", generation_config)
    if not ids:
        ids = _token_ids("config.json", "eos_token_id", model_config)
    text_config = model_config.get("text_config")
    if not ids and isinstance(text_config, dict):
        ids = _token_ids("config.json: text_config", "eos_token_id", text_config)
    ids += _token_ids("the tokenizer", "eos_token_id", {"eos_token_id": own})
    return tuple(sorted(set(ids)))


def model_defaults(config: Mapping[str, Any]) -> ModelDefaults:
    """What generation_config.json states, each value within the API's range. Raises ValueError for
    what cannot be read."""
    for key, neutral in _WITHOUT_COUNTERPART.items():
        if config.get(key) is not None and config[key] not in neutral:
            _warn_of(key, config[key])
    numbers: dict[str, float | int] = {}
    for name, entry in SAMPLING_FIELDS.items():
        key = entry.config_key
        if key and config.get(key) is not None:
            read = _count if entry.dtype == "int32" else _number
            numbers[name] = _nearest_allowed(name, read(key, config[key], entry))
    do_sample = config.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise _refused("do_sample", do_sample, "true, false or null")
    if do_sample is False:
        numbers["temperature"] = 0.0
    early_stopping = config.get("early_stopping")
    if not isinstance(early_stopping, bool | None) and early_stopping != "never":
        raise _refused("early_stopping", early_stopping, 'true, false, "never" or null')
    if early_stopping is True:
        numbers["early_stopping"] = True
    logit_bias, bans = _sequence_bias(config)
    bans += [(token_id,) for token_id in _token_ids(_FILE, "suppress_tokens", config)]
    bans += _sequences("bad_words_ids", config.get("bad_words_ids") or [])
    eos = {(token_id,) for token_id in _token_ids(_FILE, "eos_token_id", config)}
    return ModelDefaults(
        numbers,
        min_length=_count("min_length", config.get("min_length") or 0),
        logit_bias=logit_bias,
        # as in transformers, a banned EOS is not meant: no answer would end
        bad_words=tuple(dict.fromkeys(ban for ban in bans if ban not in eos)),
    )


def _sequence_bias(config: Mapping[str, Any]) -> tuple[dict[int, float], list[tuple[int, ...]]]:
    """Biases of single tokens, and what a bias of -inf bans. It is a list of [token ids, bias], or
    an object whose keys are token ids in parentheses: transformers writes either."""
    key, stated = "sequence_bias", config.get("sequence_bias") or []
    allowed = f"a list of up to {MAX_BANNED} pairs [token ids, bias]"
    if isinstance(stated, dict):
        stated = [
            [
                [int(part) for part in str(ids).strip("()").split(",") if part.strip().isdigit()],
                bias,
            ]
            for ids, bias in stated.items()
        ]
    is_list = isinstance(stated, list) and len(stated) <= MAX_BANNED
    if not is_list or not all(isinstance(pair, list) and len(pair) == 2 for pair in stated):
        raise _refused(key, config.get(key), allowed)
    biases: dict[int, float] = {}
    bans = []
    sequences = _sequences(key, [pair[0] for pair in stated])
    for sequence, (_, bias) in zip(sequences, stated, strict=True):
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not is_number or not bias <= _MAX_FLOAT32:
            raise _refused(key, config.get(key), allowed)
        if bias < -_MAX_FLOAT32:
            bans.append(sequence)
        elif len(sequence) == 1:
            biases[sequence[0]] = float(bias)
        else:
            _warn_of(f"{key} of several tokens", [list(sequence), bias])
    return biases, bans


def _sequences(key: str, stated: object) -> list[tuple[int, ...]]:
    allowed = f"a list of up to {MAX_BANNED} non-empty lists of token ids"
    if not isinstance(stated, list) or len(stated) > MAX_BANNED:
        raise _refused(key, stated, allowed)
    sequences = []
    for ids in stated:
        sequence = _token_ids(_FILE, key, {key: ids}) if isinstance(ids, list) else []
        if not sequence or len(sequence) != len(ids):
            raise _refused(key, stated, allowed)
        sequences.append(tuple(sequence))
    return sequences


def _warn_of(key: str, value: object) -> None:
    logger.warning(
        "generation_config.json sets %s to %s, which is not supported: answers are made without it",
        key,
        _short(value),
    )


def _nearest_allowed(name: str, number: float) -> float:
    """What a request would have to say for a number that it may not."""
    if name == "temperature" and number < MIN_TEMPERATURE:
        return 0.0
    return max(SMALLEST_TOP_P, number) if name == "top_p" else number


def _count(key: str, value: object, _: SamplingField | None = None) -> int:
    number = _integer(value)
    if number is None or number < -1:
        raise _refused(key, value, "an integer of at least 0; 0 and -1 are off")
    return 0 if number == -1 or number > _MAX_INT32 else number


def _number(key: str, value: object, entry: SamplingField) -> float:
    minimum = 0.0 if entry.allows_zero else max(entry.minimum, -_MAX_FLOAT32)
    maximum = min(entry.maximum, _MAX_FLOAT32)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_excluded = entry.excludes_minimum and value == minimum and key != "top_p"
    if not is_number or not minimum <= value <= maximum or is_excluded:  # type: ignore[operator]
        above = "above" if is_excluded else "from"
        raise _refused(key, value, f"a number {above} {minimum:g} to {maximum:g}, or null")
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


def _refused(key: str, value: object, allowed: str, file: str = _FILE) -> ValueError:
    return ValueError(f"{file}: {key} is {_short(value)}; allowed: {allowed}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}… ({len(text)} characters)"
