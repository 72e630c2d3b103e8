"""Checks the fields of SamplingParams one by one, and resolves their defaults.

A value that is not allowed raises RequestRejected with field, value and limit. An unset value
becomes the model's default if its generation config states one, else the neutral value of the API.
What the model bans or biases applies beside what the request does, and the request's own bias of a
token replaces the model's.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from protos import inference_pb2 as pb
from protos.api_fields import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)
from protos.sampling import SAMPLER_FIELDS, SAMPLING_FIELDS
from scheduler_svc.core.request import BeamSearch, Sampling
from scheduler_svc.engine.events import ModelFacts
from scheduler_svc.errors import RequestRejected
from scheduler_svc.front.prompts import check_token_ids
from scheduler_svc.front.served_model import Model
from scheduler_svc.text.tokenizer import Tokenizer

# Scores of a prompt are sent once all are known: with 128 bytes each, no request holds more than
# 128 MiB of them.
MAX_PROMPT_CANDIDATES: Final = 1 << 20


def given_or(asked: Any, name: str, default: Any) -> Any:
    """The field's value, or `default` when it is unset."""
    return getattr(asked, name) if asked.HasField(name) else default


def check_ranges(asked: pb.SamplingParams, max_requests_per_batch: int) -> None:
    """All numbers, by the table of protos/sampling.py. Raises RequestRejected."""
    for name in ("n", "beam_width"):  # whose first tokens come from one step, so all must fit it
        value = given_or(asked, name, 1)
        if not 1 <= value <= max_requests_per_batch:
            allowed = f"1 to {max_requests_per_batch} (max_requests_per_batch)"
            raise RequestRejected(f"sampling.{name}", value, allowed)
    for name, entry in SAMPLING_FIELDS.items():
        if asked.HasField(name) and not entry.allows(getattr(asked, name)):
            value = getattr(asked, name)
            if isinstance(value, float):
                value = float(str(np.float32(value)))  # as the client wrote it
            raise RequestRejected(f"sampling.{name}", value, entry.allowed)


def sampling_of(
    asked: pb.SamplingParams, drawn_seed: int, model: Model, num_prompt: int, max_tokens: int
) -> Sampling:
    """How the core is to choose tokens. `asked` has passed `check_ranges`."""
    defaults = {name: entry.neutral for name, entry in SAMPLER_FIELDS.items()}
    defaults |= {
        name: value
        for name, value in model.tokenizer.defaults.numbers.items()
        if name in SAMPLER_FIELDS
    }
    parameters = {name: given_or(asked, name, default) for name, default in defaults.items()}
    parameters["top_k"] = min(parameters["top_k"], model.facts.vocab_size)
    return Sampling(
        **parameters,
        seed=given_or(asked, "seed", drawn_seed),
        stop_token_ids=_stop_token_ids(asked, model),
        min_tokens=_min_tokens(asked, model, num_prompt, max_tokens),
        logit_bias=_logit_bias(asked, model),
        bad_words=_bad_words(asked, model),
        logprobs=num_candidates(asked, "logprobs", model.facts),
    )


def beams_of(asked: pb.SamplingParams, model: Model) -> BeamSearch | None:
    """The beam search asked for; None if there is none. A model's num_beams is no default."""
    if asked.beam_width <= 1:
        return None
    defaults = model.tokenizer.defaults.numbers
    return BeamSearch(
        width=asked.beam_width,
        num_answers=given_or(asked, "n", 1),
        length_penalty=given_or(asked, "length_penalty", defaults.get("length_penalty", 1.0)),
        early_stopping=given_or(asked, "early_stopping", bool(defaults.get("early_stopping"))),
        vocab_size=model.facts.vocab_size,
    )


def num_candidates(asked: pb.SamplingParams, field: str, facts: ModelFacts) -> int | None:
    """Of `logprobs` or `prompt_logprobs`; None if they are not asked for."""
    count: int | None = given_or(asked, field, None)
    if count is not None and count > facts.vocab_size:
        raise RequestRejected(
            f"sampling.{field}", count, f"at most {facts.vocab_size} (the vocabulary)"
        )
    return count


def prompt_candidates(asked: pb.SamplingParams, facts: ModelFacts, num_prompt: int) -> int | None:
    """`prompt_logprobs` of a prompt of so many tokens."""
    count = num_candidates(asked, "prompt_logprobs", facts)
    if count is not None and num_prompt * count > MAX_PROMPT_CANDIDATES:
        raise RequestRejected(
            "sampling.prompt_logprobs",
            count,
            f"at most {MAX_PROMPT_CANDIDATES // num_prompt} for a prompt of {num_prompt} tokens: "
            f"{MAX_PROMPT_CANDIDATES} candidates in all",
        )
    return count


def stop_strings(asked: pb.SamplingParams) -> list[str]:
    _check_texts("sampling.stop", asked.stop, MAX_STOPS, MAX_STOP_CHARS)
    return list(asked.stop)


def _check_texts(field: str, texts: Any, most: int, most_chars: int) -> None:
    if len(texts) > most:
        raise RequestRejected(field, f"{len(texts)} strings", f"up to {most} strings")
    for index, text in enumerate(texts):
        if not 0 < len(text) <= most_chars:
            raise RequestRejected(f"{field}[{index}]", text, f"1 to {most_chars} characters")


def _stop_token_ids(asked: pb.SamplingParams, model: Model) -> frozenset[int]:
    if len(asked.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestRejected(
            "sampling.stop_token_ids",
            f"{len(asked.stop_token_ids)} tokens",
            f"up to {MAX_STOP_TOKEN_IDS}",
        )
    check_token_ids("sampling.stop_token_ids", asked.stop_token_ids, model.facts.vocab_size)
    eos = () if asked.ignore_eos else model.tokenizer.eos_token_ids
    return frozenset([*eos, *asked.stop_token_ids])


def _min_tokens(asked: pb.SamplingParams, model: Model, num_prompt: int, max_tokens: int) -> int:
    """The request's must not exceed its max_tokens; the model's is cut to that."""
    if asked.HasField("min_tokens"):
        if asked.min_tokens > max_tokens:
            is_given = asked.HasField("max_tokens")
            bound = "max_tokens" if is_given else f"what fits beside a prompt of {num_prompt}"
            raise RequestRejected(
                "sampling.min_tokens", asked.min_tokens, f"at most {max_tokens} ({bound})"
            )
        return asked.min_tokens
    defaults = model.tokenizer.defaults
    stated = defaults.numbers.get("min_tokens")
    if stated is None:
        stated = max(0, defaults.min_length - num_prompt)
    return min(int(stated), max_tokens)


def _logit_bias(asked: pb.SamplingParams, model: Model) -> tuple[tuple[int, float], ...]:
    """By token id, as the order of a protobuf map is anyone's guess."""
    own = dict(asked.logit_bias)
    if len(own) > MAX_LOGIT_BIASES:
        raise RequestRejected(
            "sampling.logit_bias", f"{len(own)} tokens", f"up to {MAX_LOGIT_BIASES}"
        )
    vocab_size = model.facts.vocab_size
    for token_id, bias in sorted(own.items()):
        if not 0 <= token_id < vocab_size:
            allowed = f"tokens 0 to {vocab_size - 1} (the vocabulary)"
            raise RequestRejected("sampling.logit_bias", token_id, allowed)
        if not (math.isfinite(bias) and abs(bias) <= MAX_LOGIT_BIAS):
            allowed = f"{-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
            raise RequestRejected(f"sampling.logit_bias[{token_id}]", bias, allowed)
    models = model.tokenizer.defaults.logit_bias
    both = {token_id: bias for token_id, bias in models.items() if token_id < vocab_size} | own
    return tuple(sorted((token_id, bias) for token_id, bias in both.items() if bias != 0))


def _bad_words(asked: pb.SamplingParams, model: Model) -> tuple[tuple[int, ...], ...]:
    _check_texts("sampling.bad_words", asked.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
    sequences = set(model.tokenizer.defaults.bad_words)
    for index, word in enumerate(asked.bad_words):
        spelled = bad_word_token_ids(word, model.tokenizer)
        if not spelled:
            raise RequestRejected(
                f"sampling.bad_words[{index}]", word, "text that the model has tokens for"
            )
        sequences.update(spelled)
    # Whoever must not end a sequence cannot end one that ends with it; and the model's output layer
    # may be smaller than the tokenizer.
    needed = [
        sequence
        for sequence in sequences
        if sequence[-1] < model.facts.vocab_size
        and not any(sequence[begin:] in sequences for begin in range(1, len(sequence)))
    ]
    return tuple(sorted(needed))


def bad_word_token_ids(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The word's tokens within a text, with and without a space before it."""
    bare = word.lstrip(" ")
    spellings = [bare, " " + bare] if bare else [word]
    return [tuple(ids) for ids in tokenizer.encode_middles(spellings) if ids]
