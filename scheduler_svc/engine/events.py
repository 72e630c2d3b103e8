"""What the engine tells the API about requests, and what it tells about itself.

Every accepted request ends in exactly one Finished per sibling, or in one Failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler_svc.core.request import FinishReason, NewRequest
from scheduler_svc.errors import ChairliftError


class TextStream(Protocol):
    """Turns one request's tokens into text, in the engine's thread (scheduler_svc/text/text.py)."""

    include_stop_str_in_output: bool  # then a stop token's text is shown too
    matched_stop: str | None  # the stop string that was found; pushes after that add nothing

    @property
    def seeks_stop(self) -> bool:
        """Whether any token may end the request, so that each is to be pushed when it comes."""
        ...

    def push(self, token_id: int) -> str:
        """The text that may be shown after this token: whole characters, no part of a stop."""
        ...

    def push_all(self, token_ids: Sequence[int]) -> str:
        """What pushing them one by one gives."""
        ...

    def finish(self) -> str:
        """The text still held back, once it is known that no further token comes."""
        ...


@dataclass(frozen=True, slots=True)
class Submission:
    """A request handed to the engine."""

    new: NewRequest
    texts: Sequence[TextStream] = ()  # one per sibling; none: nobody reads text


@dataclass(slots=True)  # not frozen, which would triple the cost: each step makes one per request
class Delta:
    """Tokens that came back for a request's sibling, and the text they add."""

    request_id: str
    index: int
    token_ids: list[int]
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """A sibling has ended; the request has when all of them have."""

    request_id: str
    index: int
    reason: FinishReason
    stop_token_id: int | None  # at most one of these two is set, and only for reason stop
    stop_string: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queued_seconds: float
    prefill_seconds: float
    decode_seconds: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The request has ended, with all its siblings."""

    request_id: str
    error: ChairliftError


Event = Delta | Finished | Failed


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a Ready worker said, as far as the API needs it."""

    model_path: str  # where tokenizer and configs are read from: a folder or a Hub id
    model_type: str
    architecture: str
    vocab_size: int  # ids that may come out
    num_embeddings: int  # ids that may go in
    max_model_len: int  # prompt + output tokens of one request
    pool_tokens: int  # tokens that the whole KV pool holds: no request can be longer
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class Status:
    """The engine at one moment; replaced as a whole, so any thread may read it."""

    worker: str  # "none", "connecting", "loading", "ready"
    model: ModelFacts | None  # of the last worker that was ready
    fatal_error: str | None  # why no worker will ever be ready (the model is refused, say)
    num_running: int
    num_waiting: int
    busy: str = ""  # what the worker says that it does: "loading 35%", "step 12"

    @property
    def is_ready(self) -> bool:
        return self.worker == "ready"
