"""From what a client asked to what the engine takes, or an error that says what is wrong.

Every field is checked here, once: the core trusts what it gets. A value that is not allowed is
RequestRejected, naming field, value and limit; one that this version cannot honour is
NotImplementedYet; neutral values of such fields are fine. An unset value becomes the model's
default where its generation config states one, else the neutral value of the API.

Pure: the same request, model and drawn seed give the same submission. It may take a second for a
long text, so the service calls it in a thread, and what is cheap to check is checked first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from protos import inference_pb2 as pb
from scheduler_svc.core.request import NewRequest, Sampling
from scheduler_svc.engine.events import ModelFacts, Submission
from scheduler_svc.errors import NotImplementedYet, RequestRejected
from scheduler_svc.front.prompts import check_token_ids, prompt_token_ids, room
from scheduler_svc.front.served_model import Model
from scheduler_svc.text.text import OutputText

MAX_ID_CHARS: Final = 256  # of request_id and of cache_salt
MAX_STOPS: Final = 64
MAX_STOP_CHARS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 256
MIN_TEMPERATURE: Final = 1e-6  # below that (but for 0) logits divided by it leave float32
MAX_SEED: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Admitted:
    submission: Submission
    seed: int  # the one in effect


def admit(
    request: pb.GenerateRequest,
    request_id: str,
    drawn_seed: int,
    model: Model,
    max_requests_per_batch: int,
) -> Admitted:
    """Raises RequestRejected or NotImplementedYet. `drawn_seed` counts when none was asked for."""
    asked = request.sampling
    n = num_siblings(asked, max_requests_per_batch)
    refuse_what_comes_later(request)
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
    return Admitted(Submission(new, texts), sampling.seed)


def check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_ID_CHARS or not request_id.isprintable():
        raise RequestRejected(
            "request_id", request_id, f"up to {MAX_ID_CHARS} printable characters; empty = made up"
        )


def num_siblings(asked: pb.SamplingParams, max_requests_per_batch: int) -> int:
    """How many answers are wanted. Raises RequestRejected.

    Siblings get their first tokens from one step, so all of them must find a place in it.
    """
    allowed = f"1 to {max_requests_per_batch} (max_requests_per_batch)"
    _check_range(asked, "n", 1, max_requests_per_batch, allowed)
    n: int = _or(asked, "n", 1)
    return n


def refuse_what_comes_later(request: pb.GenerateRequest) -> None:
    """Raises NotImplementedYet for values that ask for what is not there, neutral ones pass."""
    asked = request.sampling
    _check_later_ranges(asked)
    constraint = asked.WhichOneof("constraint")
    later = {
        "repetition_penalty": _or(asked, "repetition_penalty", 1.0) != 1.0,
        "frequency_penalty": asked.frequency_penalty != 0.0,
        "presence_penalty": asked.presence_penalty != 0.0,
        "min_tokens": asked.min_tokens > 0,
        "logit_bias": bool(asked.logit_bias),
        "bad_words": bool(asked.bad_words),
        "beam_width": asked.beam_width > 1,
        "length_penalty": _or(asked, "length_penalty", 1.0) != 1.0,
        "early_stopping": asked.early_stopping,
        "logprobs": asked.HasField("logprobs"),
        "prompt_logprobs": asked.HasField("prompt_logprobs"),
        str(constraint): constraint is not None
        and (constraint != "json_object" or asked.json_object),
    }
    wanted = [f"sampling.{name}" for name, is_wanted in later.items() if is_wanted]
    if request.resume.output_token_ids or request.resume.text_length:
        wanted.append("resume")
    if wanted:
        raise NotImplementedYet(
            f"{', '.join(wanted)} will come in a later version; leave unset until then"
        )


def _check_later_ranges(asked: pb.SamplingParams) -> None:
    """Values that no version will take, so that they are no reason to wait for one."""
    _check_range(asked, "repetition_penalty", 0.0, math.inf, "above 0", excludes_minimum=True)
    for name in ("frequency_penalty", "presence_penalty"):
        _check_range(asked, name, -2.0, 2.0, "-2 to 2")
    _check_range(asked, "length_penalty", -math.inf, math.inf, "a number")
    for name, minimum in {
        "beam_width": 1, "min_tokens": 0, "logprobs": 0, "prompt_logprobs": 0
    }.items():  # fmt: skip
        _check_range(asked, name, minimum, math.inf, f"at least {minimum}")


def _sampling(asked: pb.SamplingParams, drawn_seed: int, model: Model) -> Sampling:
    facts = model.facts
    default = model.tokenizer.default_sampling
    if asked.temperature != 0:
        _check_range(asked, "temperature", MIN_TEMPERATURE, math.inf, _TEMPERATURES)
    _check_range(asked, "top_p", 0.0, 1.0, "above 0, up to 1", excludes_minimum=True)
    _check_range(asked, "min_p", 0.0, 1.0, "0 to 1")
    _check_range(asked, "top_k", 0, math.inf, "at least 0; 0 is off")
    _check_range(asked, "seed", 0, MAX_SEED, f"0 to {MAX_SEED}")
    _check_range(asked, "max_tokens", 1, math.inf, "at least 1")
    temperature = float(_or(asked, "temperature", default.get("temperature", 1.0)))

    if len(asked.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestRejected(
            "sampling.stop_token_ids",
            f"{len(asked.stop_token_ids)} tokens",
            f"up to {MAX_STOP_TOKEN_IDS}",
        )
    check_token_ids("sampling.stop_token_ids", asked.stop_token_ids, facts.vocab_size)
    eos = () if asked.ignore_eos else model.tokenizer.eos_token_ids
    return Sampling(
        temperature=temperature,
        top_k=min(int(_or(asked, "top_k", default.get("top_k", 0))), facts.vocab_size),
        top_p=float(_or(asked, "top_p", default.get("top_p", 1.0))),
        min_p=float(_or(asked, "min_p", default.get("min_p", 0.0))),
        seed=int(_or(asked, "seed", drawn_seed)),
        stop_token_ids=frozenset([*eos, *asked.stop_token_ids]),
    )


_TEMPERATURES: Final = f"0 (greedy), or at least {MIN_TEMPERATURE}"


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
    """The special tokens that a stop string spells: they are not in the text it is sought in."""
    if not stops:
        return {}
    return {
        token_id: token
        for token_id, token in model.tokenizer.special_tokens.items()
        if any(token in stop for stop in stops)
    }


def _max_tokens(asked: pb.SamplingParams, num_prompt: int, facts: ModelFacts) -> int:
    """What fits beside the prompt into the model's context and into the pool, or what is asked."""
    limit, name = room(facts)
    left = limit - num_prompt
    if not asked.HasField("max_tokens"):
        return left
    if asked.max_tokens > left:
        raise RequestRejected(
            "sampling.max_tokens",
            asked.max_tokens,
            f"at most {left}, for the prompt has {num_prompt} tokens and {name} is {limit}",
        )
    return asked.max_tokens


def _check_range(
    asked: pb.SamplingParams,
    name: str,
    minimum: float,
    maximum: float,
    allowed: str,
    *,
    excludes_minimum: bool = False,
) -> None:
    """Of a field that may be unset. NaN and infinities are never allowed."""
    if not asked.HasField(name):
        return
    value: float = getattr(asked, name)
    shown = value
    if isinstance(value, float):
        minimum, maximum = _float32(minimum), _float32(maximum)
        shown = float(str(np.float32(value)))  # as the client wrote it
    is_allowed = math.isfinite(value) and minimum <= value <= maximum
    if not is_allowed or (excludes_minimum and value == minimum):
        raise RequestRejected(f"sampling.{name}", shown, allowed)


def _float32(bound: float) -> float:
    """A bound as a client can say it: in the API's floats 1e-6 is 9.99999997e-07."""
    return float(np.float32(bound))


def _or(asked: Any, name: str, default: Any) -> Any:
    """The field's value, or `default` when it is unset."""
    return getattr(asked, name) if asked.HasField(name) else default
