"""Turns a client's GenerateRequest into the engine's Submission, or says what is wrong with it.

All fields are checked here, those of SamplingParams one by one in sampling_fields.py; the core
trusts its input. `request_id` and `n` are checked on arrival, as a request needs them even before
there is a model, everything else by `validate`. A value that is not allowed raises RequestRejected
with field, value and limit.

Pure: the same request, model and drawn seed give the same submission. A long text may take a
second, so the service runs `validate` in a thread, and cheap checks come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from protos import inference_pb2 as pb
from protos.api_fields import MAX_ID_CHARS
from scheduler_svc.core.limits import longest_request
from scheduler_svc.core.request import NewRequest
from scheduler_svc.engine.events import ModelFacts, Submission, check_fits
from scheduler_svc.errors import RequestRejected
from scheduler_svc.front.prompts import prompt_token_ids
from scheduler_svc.front.resuming import check_resume, check_seed, resume_text
from scheduler_svc.front.sampling_fields import (
    beams_of,
    check_ranges,
    given_or,
    prompt_candidates,
    sampling_of,
    stop_strings,
)
from scheduler_svc.front.served_model import Model
from scheduler_svc.grammar.constraint import Constraint, read_constraint
from scheduler_svc.grammar.matcher import Matcher
from scheduler_svc.text.text import OutputText


def validate(
    request: pb.GenerateRequest,
    request_id: str,
    drawn_seed: int,
    model: Model,
    max_requests_per_batch: int,
    is_streamed: bool = True,
) -> Submission:
    """Raises RequestRejected. `drawn_seed` is used if none was given."""
    asked = request.sampling
    check_ranges(asked, max_requests_per_batch)
    _check_together(request)
    resumed = check_resume(request, model.facts.vocab_size, max_requests_per_batch)
    constraint = read_constraint(asked)
    stops = stop_strings(asked)
    if len(request.cache_salt) > MAX_ID_CHARS:
        raise RequestRejected("cache_salt", request.cache_salt, f"up to {MAX_ID_CHARS} characters")

    prompt = prompt_token_ids(request, model)
    max_tokens = _max_tokens(asked, len(prompt), model.facts)
    sampling = sampling_of(asked, drawn_seed, model, len(prompt), max_tokens)
    matcher = None
    if constraint is not None:
        matcher = _matcher(constraint, asked.ignore_eos, resumed, model)
        # also under ignore_eos, EOS is how a grammar ends an answer that it lets go no further
        ends = sampling.stop_token_ids.union(model.tokenizer.eos_token_ids)
        sampling = replace(sampling, stop_token_ids=ends)
    skips_special = given_or(asked, "skip_special_tokens", True)
    decoder, pieces = model.tokenizer.decoder(skips_special), model.tokenizer.pieces(skips_special)
    hidden = _hidden_tokens(stops, model) if skips_special else {}
    n, beams = given_or(asked, "n", 1), beams_of(asked, model)
    texts = [
        OutputText(
            decoder,
            prompt,
            pieces=pieces,
            stop=stops,
            hidden=hidden,
            include_stop_str_in_output=asked.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )
        for _ in range(n)
    ]
    new = NewRequest(
        request_id,
        prompt,
        max_tokens=max_tokens,
        sampling=sampling,
        priority=request.priority,
        cache_salt=request.cache_salt,
        n=n if beams is None else 1,
        beams=beams,
        speculate=given_or(asked, "speculate", 0),
        output_token_ids=resumed,
        index=request.resume.index,
        prompt_logprobs=prompt_candidates(asked, model.facts, len(prompt)),
        is_constrained=matcher is not None,
    )
    if not request.HasField("resume"):
        return Submission(new, texts, is_streamed, matcher=matcher)
    check_seed(asked, new)
    unsent_text, end = resume_text(new, texts[0], request.resume.text_length)
    if resumed or new.index:
        new = replace(new, prompt_logprobs=None)  # they came with the first delta of sibling 0
    return Submission(new, texts, is_streamed, unsent_text, end, matcher)


def check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_ID_CHARS or not request_id.isprintable():
        raise RequestRejected(
            "request_id",
            request_id,
            f"up to {MAX_ID_CHARS} printable characters; empty = generated",
        )


def num_siblings(asked: pb.SamplingParams, max_requests_per_batch: int) -> int:
    """The number of answers requested. Raises RequestRejected."""
    check_ranges(asked, max_requests_per_batch)
    n: int = given_or(asked, "n", 1)
    return n


def _check_together(request: pb.GenerateRequest) -> None:
    """Fields that exclude each other. Raises RequestRejected."""
    asked = request.sampling
    constraint = constraint_of(asked)
    is_beam_search = asked.beam_width > 1
    if asked.HasField("max_tokens") and asked.max_tokens == 0:
        if not asked.HasField("prompt_logprobs"):
            raise RequestRejected("sampling.max_tokens", 0, "at least 1, or 0 with prompt_logprobs")
        for name, is_given in {
            "n": asked.n > 1, "beam_width": is_beam_search, constraint: constraint != "",
        }.items():  # fmt: skip
            if is_given:
                raise RequestRejected(
                    f"sampling.{name}", getattr(asked, name), "unset with max_tokens 0"
                )
    if not is_beam_search:
        return
    if asked.n > asked.beam_width:
        raise RequestRejected("sampling.n", asked.n, f"1 to {asked.beam_width} (beam_width)")
    if asked.speculate:
        allowed = f"0, with beam_width {asked.beam_width}"
        raise RequestRejected("sampling.speculate", asked.speculate, allowed)


def constraint_of(asked: pb.SamplingParams) -> str:
    """The field that constrains the answer; "" if none does."""
    name = asked.WhichOneof("constraint") or ""
    return "" if name == "json_object" and not asked.json_object else name


def _matcher(
    constraint: Constraint, ignores_eos: bool, resumed: Sequence[int], model: Model
) -> Matcher:
    """Raises RequestRejected."""
    grammar = model.grammars.compile(constraint)
    has_ended = resumed and resumed[-1] in model.tokenizer.eos_token_ids
    if not grammar.allows(resumed[:-1] if has_ended else resumed):
        raise RequestRejected(
            "resume.output_token_ids",
            f"{len(resumed)} tokens",
            f"the beginning of an answer that {constraint.field} allows",
        )
    return Matcher(grammar, ignores_eos)


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
    """The value given, or as many as fit beside the prompt, for each beam."""
    width = given_or(asked, "beam_width", 1)
    if asked.HasField("max_tokens"):
        check_fits(num_prompt, asked.max_tokens, facts, width)
        return asked.max_tokens
    longest, _ = longest_request(facts.max_model_len, facts.pool_tokens_of(num_prompt, width))
    return longest - num_prompt
