"""The answers under way: each live request's text and times, and the events that tell of them.

Lives in the engine's thread. Sees to it that every accepted request ends in exactly one Finished
for each sibling, or in one Failed, and that nothing is told of it after that.

A message to a client costs some 100 µs, whatever is in it, so of all answers together at most
MESSAGES_PER_SECOND deltas are told, who has waited longest first: with many of them, each gets its
tokens in bigger portions, a little later, rather than all of them falling behind. A token that is
not told yet costs next to nothing: the core has it, and text is made of many at once. A first
token and an end never wait, and where stop strings are sought every token is read when it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.engine.events import Delta, Event, Failed, Finished, TextStream
from scheduler_svc.errors import ChairliftError

MESSAGES_PER_SECOND: Final = 3000  # to all clients; a third of what one core can write
MAX_BURST: Final = 200  # of them at once: while they are written nobody else is heard


@dataclass(slots=True)
class Answer:
    """One live request or sibling; times by the engine's clock, in seconds."""

    request: Request
    text: TextStream | None
    submitted: float
    scheduled: float | None = None
    first_token: float | None = None
    num_read: int = 0  # output tokens that text was made of
    num_told: int = 0  # of them, told of
    untold: str = ""  # the text of the others


class Answers:
    """All live answers, in order of arrival, and the events not delivered yet."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._live: dict[str, dict[int, Answer]] = {}  # request_id → index → answer
        self._of: dict[Request, Answer] = {}  # the same, for the way from a token to its text
        self._followed: set[Request] = set()  # without a token yet, or with stop strings
        self._fresh: list[Request] = []  # got a token
        self._ended: list[Request] = []  # with such a token
        self._waiting: dict[Request, None] = {}  # with tokens not told of; the longest first
        self._events: list[Event] = []
        self._allowance = float(MAX_BURST)  # messages that may be told now
        self._refilled = clock()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __iter__(self) -> Iterator[Answer]:
        return iter([answer for family in self._live.values() for answer in family.values()])

    def family(self, request_id: str) -> list[Answer]:
        """Those of the request's siblings that live."""
        return list(self._live.get(request_id, {}).values())

    def begin(self, request: Request, text: TextStream | None) -> None:
        family = self._live.setdefault(request.request_id, {})
        answer = Answer(request, text, self._clock())
        family[request.index] = self._of[request] = answer
        self._followed.add(request)

    def note_scheduled(self, request: Request) -> None:
        """The request has a row; those of its siblings have theirs too."""
        for answer in self.family(request.request_id):
            if answer.scheduled is None:
                answer.scheduled = self._clock()

    @property
    def is_behind(self) -> bool:
        """Whether somebody has tokens that are not told of."""
        return bool(self._waiting)

    def take_in(self, sampled: list[Request], ended: list[Request]) -> None:
        """Who got a token, and whom it ended; `make_text` tells of it, then or later."""
        self._fresh += sampled
        self._ended += ended

    def make_text(self, finish: Callable[[Request], None]) -> None:
        """Deltas for those whose turn it is, and Finished for requests that have ended.

        `finish` is called for a request that a stop string ends while it is still running.
        """
        fresh, self._fresh = dict.fromkeys(self._fresh), []
        ended, self._ended = self._ended, []
        self._waiting.update(fresh)  # who waits already keeps the place
        for request in filter(self._followed.__contains__, fresh):
            answer = self._of[request]
            self._read(answer)
            if answer.text is not None and answer.text.matched_stop is not None:
                if request.finish_reason is None:
                    finish(request)
                ended.append(request)
            elif answer.first_token is None:
                answer.first_token = self._clock()
                self._tell(answer)
            if answer.text is None or not answer.text.seeks_stop:
                self._followed.remove(request)
        for request in ended:
            if request in self._of:
                self.end(self._of[request])
        self._tell_waiting()

    def end(self, answer: Answer) -> None:
        """Tells the rest of a request that has ended, and that it has."""
        self._read(answer)
        if answer.text is not None:
            answer.untold += answer.text.finish()
        self._tell(answer)
        self._remove(answer)
        self._events.append(self._finished(answer))

    def fail(self, request_id: str, error: ChairliftError) -> None:
        """Ends a live request with all its siblings."""
        for answer in self.family(request_id):
            self._read(answer)
            self._tell(answer)
            self._remove(answer)
        self._events.append(Failed(request_id, error))

    def refuse(self, request_id: str, error: ChairliftError) -> None:
        """Tells of a request that was never accepted."""
        self._events.append(Failed(request_id, error))

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _read(self, answer: Answer) -> None:
        """Makes text of the tokens that have come, up to a stop string."""
        request, text = answer.request, answer.text
        tokens = request.token_ids[request.num_prompt_tokens + answer.num_read :]
        if text is None:
            answer.num_read += len(tokens)
            return
        if not tokens or text.matched_stop is not None:
            return
        answer.num_read += len(tokens)
        is_silent = request.stop_token_id is not None and not text.include_stop_str_in_output
        shown = tokens[:-1] if is_silent else tokens
        if not text.seeks_stop:
            answer.untold += text.push_all(shown)
            return
        for place, token_id in enumerate(shown, 1):
            answer.untold += text.push(token_id)
            if text.matched_stop is not None:
                answer.num_read -= len(tokens) - place
                return

    def _tell_waiting(self) -> None:
        """As many deltas as are due by now."""
        now = self._clock()
        due = (now - self._refilled) * MESSAGES_PER_SECOND
        self._allowance = min(self._allowance + due, MAX_BURST)
        self._refilled = now
        while self._waiting and self._allowance >= 1:
            answer = self._of[next(iter(self._waiting))]
            self._read(answer)
            self._tell(answer)

    def _tell(self, answer: Answer) -> None:
        """A delta of all that was read and not told of."""
        request = answer.request
        self._waiting.pop(request, None)
        begin = request.num_prompt_tokens
        tokens = request.token_ids[begin + answer.num_told : begin + answer.num_read]
        if not tokens and not answer.untold:
            return
        self._events.append(Delta(request.request_id, request.index, tokens, answer.untold))
        self._allowance -= 1
        answer.num_told = answer.num_read
        answer.untold = ""

    def _remove(self, answer: Answer) -> None:
        request = answer.request
        del self._of[request]
        self._followed.discard(request)
        self._waiting.pop(request, None)
        if self._fresh:  # it, or one of its siblings, fails with the step that it got a token of
            self._fresh = [other for other in self._fresh if other is not request]
        family = self._live[request.request_id]
        del family[request.index]
        if not family:
            del self._live[request.request_id]

    def _finished(self, answer: Answer) -> Finished:
        request, now = answer.request, self._clock()
        scheduled = now if answer.scheduled is None else answer.scheduled
        first_token = now if answer.first_token is None else answer.first_token
        stop_string = None if answer.text is None else answer.text.matched_stop
        reason = FinishReason.STOP if stop_string is not None else request.finish_reason
        assert reason is not None
        return Finished(
            request_id=request.request_id,
            index=request.index,
            reason=reason,
            stop_token_id=None if stop_string is not None else request.stop_token_id,
            stop_string=stop_string,
            prompt_tokens=request.num_prompt_tokens,
            completion_tokens=answer.num_told,
            cached_tokens=request.num_cached_tokens,
            queued_seconds=scheduled - answer.submitted,
            prefill_seconds=first_token - scheduled,
            decode_seconds=now - first_token,
            preemptions=request.num_preemptions,
        )
