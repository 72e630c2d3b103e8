"""What clients are told in a random life (random_lives.py), and whether it is right.

Sees every submission and abort when the engine obeys it, and reads every event: each accepted
request ends once per sibling, or fails once; with the right tokens, text and usage; and it fails
only if it is poisonous, does not fit the memory, or was in failed steps more than once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_svc.core.limits import Geometry, why_never_fits
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.engine.events import Delta, Event, Failed, Finished, Submission
from scheduler_svc.errors import DuplicateRequest, QueueFull, RequestFailed, RequestRejected
from tests.support.engine_harness import Bench

REFUSALS = (DuplicateRequest, QueueFull, RequestRejected)
LETTERS = 26  # token t reads as letter t mod 26


@dataclass(eq=False)
class Asked:
    """A request, what it must say, and what it has said."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    n: int
    stop: str  # a letter, or empty
    stop_token_ids: frozenset[int]
    priority: int
    poison: str  # how a step fails that computes it up to `place`; empty: it does not
    place: int
    right: list[list[int]]  # by sibling, up to the token that completes a stop
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    num_failures: int = 0  # failed steps that it was in, and not by its own fault
    may_not_fit: bool = False  # the memory of a worker that came meanwhile
    is_aborted: bool = False

    def __post_init__(self) -> None:
        self.tokens = {index: [] for index in range(self.n)}
        self.texts = dict.fromkeys(range(self.n), "")


def letter(token: int) -> str:
    return chr(ord("a") + token % LETTERS)


class Witness:
    """See the module's docstring."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.submitted: list[Asked] = []  # and not obeyed yet
        self.told: dict[str, list[Asked]] = {}  # accepted, and not ended as far as was read
        self.of: dict[Request, Asked] = {}
        self.happened: Counter[str] = Counter()
        self.num_read = 0  # events
        self.on_submit_of_engine = bench.engine.on_submit
        bench.engine.on_submit = self.on_submit  # type: ignore[method-assign]
        self.on_abort_of_engine = bench.engine.on_abort
        bench.engine.on_abort = self.on_abort  # type: ignore[method-assign]

    def memory_changes(self) -> None:
        """To that of the link, with the next worker."""
        for family in self.told.values():
            for asked in family:
                asked.may_not_fit |= self.never_fits(asked, self.bench.link.geometry)

    def never_fits(self, asked: Asked, geometry: Geometry) -> bool:
        pool_tokens = geometry.pool_tokens(self.bench.engine._state.holds_ended)
        longest = geometry.max_model_len
        reason = why_never_fits(len(asked.prompt), asked.max_tokens, longest, pool_tokens)
        return reason is not None

    def on_submit(self, submission: Submission) -> None:
        """In the engine's place: sees whether the request is accepted."""
        asked = self.submitted.pop(0)
        request_id, engine = asked.request_id, self.bench.engine
        was_live, num_queued = request_id in engine._answers, engine._state.num_queued()
        num_told = len(engine._answers._events)
        self.on_submit_of_engine(submission)
        for refusal in engine._answers._events[num_told:]:
            assert isinstance(refusal, Failed)
            error = refusal.error
            self.happened[type(error).__name__] += 1
            assert was_live == isinstance(error, DuplicateRequest)
            if isinstance(error, QueueFull):
                assert 0 < engine._max_queue_size <= num_queued
            if isinstance(error, RequestRejected):
                assert self.never_fits(asked, engine._state.geometry)
            return
        asked.may_not_fit = self.never_fits(asked, self.bench.link.geometry)
        self.told.setdefault(request_id, []).append(asked)
        for request in engine._state.requests[request_id]:
            self.of[request] = asked

    def on_abort(self, request_ids: Sequence[str]) -> list[str]:
        """In the engine's place: sees who is live by then."""
        for request_id in request_ids:
            for asked in self.told.get(request_id, []):
                asked.is_aborted = True
        return self.on_abort_of_engine(request_ids)

    def read_events(self) -> None:
        for event in self.bench.events[self.num_read :]:
            self.read(event)
        self.num_read = len(self.bench.events)

    def read(self, event: Event) -> None:
        if isinstance(event, Failed) and isinstance(event.error, REFUSALS):
            return
        asked = self.told[event.request_id][0]
        if isinstance(event, Failed):
            self.check_failure(asked, event)
            asked.ended = set(range(asked.n))
        elif isinstance(event, Delta):
            assert event.index not in asked.ended, "told after the end"
            asked.tokens[event.index] += event.token_ids
            asked.texts[event.index] += event.text
            right = asked.right[event.index][: len(asked.tokens[event.index])]
            assert asked.tokens[event.index] == right, f"wrong tokens of {asked}"
        else:
            assert event.index not in asked.ended, "ended twice"
            asked.ended.add(event.index)
            self.check_end(asked, event)
        if len(asked.ended) == asked.n:
            self.told[event.request_id].pop(0)
            if not self.told[event.request_id]:
                del self.told[event.request_id]

    def check_end(self, asked: Asked, end: Finished) -> None:
        self.happened[end.reason.value] += 1
        tokens, right = asked.tokens[end.index], asked.right[end.index]
        assert end.prompt_tokens == len(asked.prompt)
        assert end.completion_tokens == len(tokens)
        shown = tokens
        if end.reason is FinishReason.ABORT:
            assert asked.is_aborted
        else:
            assert tokens == right, f"{asked} ended early"
            assert not asked.poison or len(asked.prompt) + len(tokens) - 1 < asked.place
            is_length = end.reason is FinishReason.LENGTH
            assert is_length == (end.stop_string is None and end.stop_token_id is None)
            if is_length:
                assert len(tokens) == asked.max_tokens
            else:
                assert end.stop_token_id == tokens[-1] or end.stop_string == letter(tokens[-1])
                shown = tokens[:-1]
        assert asked.texts[end.index] == "".join(map(letter, shown))

    def check_failure(self, asked: Asked, failed: Failed) -> None:
        assert isinstance(failed.error, RequestFailed), failed
        reason = str(failed.error)
        if "does not fit" in reason:
            self.happened["did not fit"] += 1
            assert asked.may_not_fit
        else:
            assert "the step that computed it" in reason, failed
            self.happened["guilty"] += 1
            # who was in no more than one failed step of others cannot be taken for guilty
            assert asked.poison or asked.num_failures >= 2, f"{asked} is innocent: {failed}"
