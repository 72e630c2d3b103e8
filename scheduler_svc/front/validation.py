"""Turns a client's GenerateRequest into the engine's Submission, or says what is wrong with it.

All fields are checked by functions of this file; the core trusts its input. `request_id` and `n`
are checked on arrival, as a request needs them even before there is a model, everything else by
`validate`. A value that is not allowed raises RequestRejected with field, value and limit; one that
this version does not support raises NotImplementedYet, unless it is neutral. An unset value becomes
the model's default if its generation config states one, else the neutral value of the API.

Pure: the same request, model and drawn seed give the same submission. A long text may take a
second, so the service runs `validate` in a thread, and cheap checks come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from protos import inference_pb2 as pb
from protos.sampling import SAMPLER_FIELDS, SAMPLING_FIELDS
from scheduler_svc.core.limits import longest_request
from scheduler_svc.core.request import NewRequest, Sampling
from scheduler_svc.engine.events import ModelFacts, Submission, check_fits
from scheduler_svc.errors import NotImplementedYet, RequestRejected
from scheduler_svc.front.prompts import check_token_ids, prompt_token_ids
from scheduler_svc.front.served_model import Model
from scheduler_svc.text.text import OutputText

MAX_ID_CHARS: Final = 256  # of request_id and of cache_salt
MAX_STOPS: Final = 64
MAX_STOP_CHARS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 256


def validate(
    request: pb.GenerateRequest,
    request_id: str,
    drawn_seed: int,
    model: Model,
    max_requests_per_batch: int,
    is_streamed: bool = True,
) -> Submission:
    """Raises RequestRejected or NotImplementedYet. `drawn_seed` is used if none was given."""
    asked = request.sampling
    n = num_siblings(asked, max_requests_per_batch)
    _check_ranges(asked)
    _refuse_unsupported(request)
    sampling = _sampling(asked, drawn_seed, model)
    stops = _stop_strings(asked)
    if len(request.cache_salt) > MAX_ID_CHARS:
        raise RequestRejected("cache_salt", request.cache_salt, f"up to {MAX_ID_CHARS} characters")

    prompt = prompt_token_ids(request, model)
    skips_special = _or(asked, "skip_special_tokens", True)
    decoder, pieces = model.tokenizer.decoder(skips_special), model.tokenizer.pieces(skips_special)
    hidden = _hidden_tokens(stops, model) if skips_special else {}
    texts = [
        OutputText(
            decoder,
            prompt,
            pieces=pieces,
            stop=stops,
            hidden=hidden,
            include_stop_str_in_output=asked.include_stop_str_in_output,
        )
        for _ in range(n)
    ]
    new = NewRequest(
        request_id,
        prompt,
        max_tokens=_max_tokens(asked, len(prompt), model.facts),
        sampling=sampling,
        priority=request.priority,
        cache_salt=request.cache_salt,
        n=n,
    )
    return Submission(new, texts, is_streamed)


def check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_ID_CHARS or not request_id.isprintable():
        raise RequestRejected(
            "request_id",
            request_id,
            f"up to {MAX_ID_CHARS} printable characters; empty = generated",
        )


def num_siblings(asked: pb.SamplingParams, max_requests_per_batch: int) -> int:
    """The number of answers requested. Raises RequestRejected.

    Siblings get their first tokens from one step, so all of them must fit into it.
    """
    n: int = _or(asked, "n", 1)
    if not 1 <= n <= max_requests_per_batch:
        allowed = f"1 to {max_requests_per_batch} (max_requests_per_batch)"
        raise RequestRejected("sampling.n", n, allowed)
    return n


def _check_ranges(asked: pb.SamplingParams) -> None:
    for name, entry in SAMPLING_FIELDS.items():
        if asked.HasField(name) and not entry.allows(getattr(asked, name)):
            value = getattr(asked, name)
            if isinstance(value, float):
                value = float(str(np.float32(value)))  # as the client wrote it
            raise RequestRejected(f"sampling.{name}", value, entry.allowed)


def _refuse_unsupported(request: pb.GenerateRequest) -> None:
    """Raises NotImplementedYet for fields without support, unless they have neutral values."""
    asked = request.sampling
    constraint = asked.WhichOneof("constraint")
    wanted = {
        "sampling.logit_bias": bool(asked.logit_bias),
        "sampling.bad_words": bool(asked.bad_words),
        "sampling.beam_width": asked.beam_width > 1,
        "sampling.early_stopping": asked.early_stopping,
        f"sampling.{constraint}": constraint is not None
        and (constraint != "json_object" or asked.json_object),
        "resume": bool(request.resume.output_token_ids or request.resume.text_length),
    }
    if any(wanted.values()):
        names = ", ".join(name for name, is_wanted in wanted.items() if is_wanted)
        raise NotImplementedYet(f"{names}: not supported yet; leave unset")


def _sampling(asked: pb.SamplingParams, drawn_seed: int, model: Model) -> Sampling:
    facts = model.facts
    if len(asked.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestRejected(
            "sampling.stop_token_ids",
            f"{len(asked.stop_token_ids)} tokens",
            f"up to {MAX_STOP_TOKEN_IDS}",
        )
    check_token_ids("sampling.stop_token_ids", asked.stop_token_ids, facts.vocab_size)
    eos = () if asked.ignore_eos else model.tokenizer.eos_token_ids
    neutral = {name: entry.neutral for name, entry in SAMPLER_FIELDS.items()}
    defaults = neutral | model.tokenizer.default_sampling
    parameters = {name: _or(asked, name, default) for name, default in defaults.items()}
    parameters["top_k"] = min(parameters["top_k"], facts.vocab_size)
    return Sampling(
        **parameters,
        seed=_or(asked, "seed", drawn_seed),
        stop_token_ids=frozenset([*eos, *asked.stop_token_ids]),
    )


def _stop_strings(asked: pb.SamplingParams) -> list[str]:
    if len(asked.stop) > MAX_STOPS:
        raise RequestRejected(
            "sampling.stop", f"{len(asked.stop)} strings", f"up to {MAX_STOPS} strings"
        )
    for index, stop in enumerate(asked.stop):
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise RequestRejected(
                f"sampling.stop[{index}]", stop, f"1 to {MAX_STOP_CHARS} characters"
            )
    return list(asked.stop)


def _hidden_tokens(stops: Sequence[str], model: Model) -> dict[int, str]:
    """The special tokens that a stop string spells, which the output text omits."""
    if not stops:
        return {}
    return {
        token_id: token
        for token_id, token in model.tokenizer.special_tokens.items()
        if any(token in stop for stop in stops)
    }


def _max_tokens(asked: pb.SamplingParams, num_prompt: int, facts: ModelFacts) -> int:
    """The value given, or as many as fit beside the prompt."""
    if asked.HasField("max_tokens"):
        check_fits(num_prompt, asked.max_tokens, facts)
        return asked.max_tokens
    longest, _ = longest_request(facts.max_model_len, facts.pool_tokens)
    return longest - num_prompt


def _or(asked: Any, name: str, default: Any) -> Any:
    """The field's value, or `default` when it is unset."""
    return getattr(asked, name) if asked.HasField(name) else default
