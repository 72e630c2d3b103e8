"""What the API hands to the engine, and what the engine reports of requests and of itself.

Every accepted request ends in exactly one Finished per sibling, or in one Failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler_svc.core.limits import NO_MEMORY, Geometry, why_never_fits
from scheduler_svc.core.request import FinishReason, NewRequest, TokenScore
from scheduler_svc.errors import ChairliftError, RequestRejected

if TYPE_CHECKING:
    from scheduler_svc.grammar.matcher import Matcher
    from scheduler_svc.text.text import OutputText


@dataclass(slots=True)  # not frozen, which would triple the cost of making one
class Delta:
    """New tokens of a request's sibling, and the text they add."""

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    logprobs: Sequence[TokenScore] = ()  # one for each of token_ids, if asked for
    prompt_logprobs: Sequence[TokenScore] = ()  # with the first delta of the first sibling
    # set by the stream when the handler takes it; the engine merges what follows until then
    is_taken: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Finished:
    """A sibling has ended; the request has ended when all of them have."""

    request_id: str
    index: int
    reason: FinishReason
    stop_token_id: int | None = None  # at most one of these two is set, and only for reason stop
    stop_string: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    queued_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    beam_score: float | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated request."""

    new: NewRequest
    texts: Sequence[OutputText] = ()  # one per sibling; empty: only tokens are wanted
    is_streamed: bool = True  # False: one delta per sibling, at its end
    unsent_text: str = ""  # of a resumed answer, whose tokens its text has read
    end: Finished | None = None  # of a resumed answer that has all its tokens; not for the engine
    matcher: Matcher | None = None  # of the grammar; each sibling gets a copy


@dataclass(frozen=True, slots=True)
class Failed:
    """The request has ended, with all its siblings."""

    request_id: str
    error: ChairliftError


Event = Delta | Finished | Failed


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The part of a worker's Ready that the API needs."""

    model_path: str  # the folder or Hub id that tokenizer and configuration are read from
    model_type: str
    architecture: str
    vocab_size: int  # output ids are below it
    num_embeddings: int  # input ids are below it
    max_model_len: int  # prompt + output tokens of one request
    pool_tokens: int  # prompt + output tokens of the longest request that the KV pool holds
    dtype: str
    device: str
    geometry: Geometry = NO_MEMORY  # of the KV pool, for requests with beams

    def pool_tokens_of(self, prompt_tokens: int, num_beams: int) -> int:
        """Prompt + output tokens of each beam that the KV pool holds; 1 = no beam search."""
        if num_beams == 1:
            return self.pool_tokens
        return self.geometry.pool_tokens(False, num_beams, prompt_tokens)


def check_fits(prompt_tokens: int, max_tokens: int, facts: ModelFacts, num_beams: int = 1) -> None:
    """Raises RequestRejected for a request that could not run even alone."""
    pool_tokens = facts.pool_tokens_of(prompt_tokens, num_beams)
    reason = why_never_fits(prompt_tokens, max_tokens, facts.max_model_len, pool_tokens, num_beams)
    if reason is not None:
        most = max(0, min(facts.max_model_len, pool_tokens) - prompt_tokens)
        raise RequestRejected("sampling.max_tokens", max_tokens, f"at most {most}: {reason}")


@dataclass(frozen=True, slots=True)
class Status:
    """The engine at one moment; replaced as a whole, so any thread may read it."""

    worker: str = "none"  # "none", "connecting", "loading", "ready"
    model: ModelFacts | None = None  # of the last worker that was ready
    fatal_error: str | None = None  # why no worker will ever be ready, e.g. an unsupported model
    num_running: int = 0
    num_waiting: int = 0
    busy: str = ""  # what the worker is doing, by its heartbeats: "loading 35%", "step 12"

    @property
    def is_ready(self) -> bool:
        return self.worker == "ready"
