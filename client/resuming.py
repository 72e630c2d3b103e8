"""Carries one stream over losses: which calls go on with it, when, and what they are asked.

`Course` is a state machine without a connection: the clients tell it what arrived and what failed,
and it says what to do next. A call that fails in passing (the server was away, or full) is made
again after a pause:

- before anything has arrived, as it was;
- afterwards with `resume`, which names the tokens and the length of the text that have arrived, and
  with the seed that the server chose: the answer goes on where it broke off. Siblings go on by one
  call each, under the ids ID.0, ID.1, …;
- a beam search, and a request that only scores its prompt, start again; they deliver at their end,
  and what has come already is left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import grpc

from client.answers import Delta, Transcript
from client.errors import (
    ChairliftError,
    DeadlineExceeded,
    DuplicateRequest,
    QueueFull,
    ServerError,
    Unavailable,
)
from protos import inference_pb2

DEFAULT_RETRIES: Final = 10  # about half a minute
FIRST_PAUSE_SECONDS: Final = 0.2
MAX_PAUSE_SECONDS: Final = 5.0
# A server may notice late that a connection is lost, and hold the id for the lost call until then.
MAX_DUPLICATES: Final = 3


@dataclass(slots=True, eq=False)
class Leg:
    """One call of a stream."""

    request: inference_pb2.GenerateRequest
    index: int | None = None  # the one sibling that it resumes; None = all, from the start
    arrived: frozenset[int] = frozenset()  # siblings whose chunks are sent a second time
    failures: int = 0  # calls in a row, this one not included, that brought nothing
    duplicates: int = 0  # of those, refused because their id was live
    has_started: bool = False


class Course:
    """The course of one request over all its calls."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        retries: int,
        deadline: float | None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`retries`: calls in a row that may bring nothing; 0 = the first loss is an error.
        `deadline`: of all calls together, on the caller's clock. `jitter`: from [0, 1)."""
        if retries < 0:
            raise ValueError(f"retries is {retries}; allowed: at least 0")
        self.transcript = Transcript()
        self._request = request
        self._retries = retries
        self._deadline = deadline
        self._jitter = jitter

    def first(self) -> Leg:
        """The call to begin with."""
        return Leg(self._request)

    def remaining(self, now: float) -> float | None:
        """Seconds that a call may take from now on; None = any time."""
        return None if self._deadline is None else max(0.0, self._deadline - now)

    def absorb(self, leg: Leg, response: inference_pb2.GenerateResponse) -> Delta | None:
        """Adds what has arrived; returns its Delta if there is one that the caller has not seen.

        Raises ServerError if another model answers than the one that began."""
        kind = response.WhichOneof("event")
        if kind == "started":
            self._start(leg, response)
            return None
        if leg.index is not None:
            response.index = leg.index
        leg.failures = leg.duplicates = 0
        if response.index in self.transcript.completions:
            return None
        if kind == "chunk" and response.index in leg.arrived:
            return None
        return self.transcript.absorb(response)

    def after(self, leg: Leg, error: ChairliftError, now: float) -> tuple[float, list[Leg]]:
        """What follows a call that failed: seconds to wait, and the calls to make then.

        Raises the error if it is not one that passes, or if too many calls brought nothing.
        """
        if leg.has_started and not self._unfinished(leg):
            return 0.0, []  # only the end of the call was lost
        leg.failures += 1
        if not self._passes(leg, error) or leg.failures > self._retries:
            raise error
        seconds = self._pause(leg, error)
        if self._deadline is not None and now + seconds >= self._deadline:
            raise DeadlineExceeded(
                f"the timeout passed before the answer was complete; the last attempt: {error}",
                grpc.StatusCode.DEADLINE_EXCEEDED,
            )
        return seconds, self._successors(leg)

    def _start(self, leg: Leg, response: inference_pb2.GenerateResponse) -> None:
        leg.has_started = True
        first = self.transcript.started
        if first is None:
            self.transcript.absorb(response)
            return
        if response.started.model != first.model:
            raise ServerError(
                f"the answer was begun by the model {first.model!r}, and after a loss the server "
                f"runs {response.started.model!r}",
                grpc.StatusCode.ABORTED,
            )
        if leg.index is None or self._num_siblings == 1:  # the id to abort it by
            self.transcript.started = replace(first, request_id=response.started.request_id)

    def _passes(self, leg: Leg, error: ChairliftError) -> bool:
        """Whether another call may succeed where this one has failed."""
        if isinstance(error, DuplicateRequest):  # its own call, of which the server knows no end
            leg.duplicates += 1
            return leg.failures > 1 or self.transcript.started is not None
        return isinstance(error, Unavailable) or (
            isinstance(error, QueueFull) and not leg.has_started
        )

    def _pause(self, leg: Leg, error: ChairliftError) -> float:
        """Seconds: doubled with each failure, and half of it at random, so that the clients of a
        server that comes back do not come all at once."""
        full = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(leg.failures - 1, 30))
        seconds: float = full * (0.5 + 0.5 * self._jitter())
        return error.retry_seconds + seconds if isinstance(error, QueueFull) else seconds

    def _successors(self, leg: Leg) -> list[Leg]:
        started = self.transcript.started
        again = Leg(self._request, failures=leg.failures, duplicates=leg.duplicates)
        if started is None:
            return [again]
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        request.sampling.seed = started.seed
        request.request_id = self._request_id(leg, started.request_id)
        again.request = request
        if not self.transcript.deltas and not self.transcript.completions:
            return [again]
        if self._delivers_at_its_end():
            again.arrived = frozenset(self.transcript.deltas)
            return [again]
        return [self._resumed(leg, request, index) for index in self._unfinished(leg)]

    def _resumed(self, leg: Leg, request: inference_pb2.GenerateRequest, index: int) -> Leg:
        deltas = self.transcript.deltas.get(index, [])
        resumed = inference_pb2.GenerateRequest()
        resumed.CopyFrom(request)
        resumed.sampling.ClearField("n")
        if deltas:
            resumed.sampling.ClearField("prompt_logprobs")  # they came with the first chunk
        resumed.resume.index = index
        resumed.resume.text_length = sum(len(delta.text) for delta in deltas)
        for delta in deltas:
            resumed.resume.output_token_ids.extend(delta.token_ids)
        if self._num_siblings > 1 and request.request_id and leg.index is None:
            resumed.request_id = f"{request.request_id}.{index}"
        return Leg(resumed, index=index, failures=leg.failures, duplicates=leg.duplicates)

    def _request_id(self, leg: Leg, first_id: str) -> str:
        """The id that the caller knows, to abort by; empty, that is a new one, where the server
        would not give it free."""
        if leg.duplicates > MAX_DUPLICATES:
            return ""
        return leg.request.request_id if leg.index is not None else first_id

    def _unfinished(self, leg: Leg) -> list[int]:
        indices = range(self._num_siblings) if leg.index is None else [leg.index]
        return [index for index in indices if index not in self.transcript.completions]

    def _delivers_at_its_end(self) -> bool:
        sampling = self._request.sampling
        is_scoring = sampling.HasField("max_tokens") and sampling.max_tokens == 0
        completions = self.transcript.completions.values()
        is_beam_search = sampling.beam_width > 1 or any(
            completion.beam_score is not None for completion in completions
        )
        return is_scoring or is_beam_search

    @property
    def _num_siblings(self) -> int:
        return self._request.sampling.n or 1
