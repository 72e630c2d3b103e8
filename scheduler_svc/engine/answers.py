"""Answers in progress: each live request's text and times, and the events for its client.

Lives in the engine's thread. Every accepted request ends in exactly one Finished per sibling, or in
one Failed, and no event of it follows.

This is the one place where text is paced and merged. A message to a client costs some 100 µs,
whatever is in it, so all answers together send at most MESSAGES_PER_SECOND deltas, those that have
waited longest first: under load each client gets larger portions a little later, instead of all of
them falling behind. A client that reads slowly gets no further delta until its stream has taken the
last one, and an answer wanted in one piece gets none before its end. An unsent token costs next to
nothing: the core has stored it, and many are turned into text at once. First tokens and ends are
never delayed, and where stop strings are searched for, every token is read when it arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from scheduler_svc.core.request import FinishReason, Request, TokenScore
from scheduler_svc.engine.events import Delta, Event, Failed, Finished
from scheduler_svc.errors import ChairliftError

if TYPE_CHECKING:
    from scheduler_svc.text.text import OutputText

MESSAGES_PER_SECOND: Final = 3000  # to all clients; a third of what one core can write
MAX_BURST: Final = 200  # messages at once: while they are written, the event loop does little else


@dataclass(slots=True, eq=False)
class Answer:
    """One live request or sibling; times in seconds by the engine's clock."""

    request: Request
    text: OutputText | None
    last_delta: Delta | None  # the last one sent; until it is taken, tokens accumulate here
    submitted: float
    scheduled: float | None = None
    first_token: float | None = None
    num_read: int = 0  # output tokens turned into text
    num_sent: int = 0  # output tokens sent to the client
    unsent_text: str = ""
    num_resumed: int = 0  # output tokens that came with the request
    owes_prompt_scores: bool = True

    @property
    def is_held_back(self) -> bool:
        return self.last_delta is not None and not self.last_delta.is_taken


class Answers:
    """All live answers, in order of arrival, and the events not delivered yet."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.is_behind = False  # some deltas could not be sent at once
        self._clock = clock
        self._families: dict[str, dict[int, Answer]] = {}  # request_id → index → answer
        self._answers: dict[Request, Answer] = {}  # the same, without the detour over the family
        self._eager: set[Request] = set()  # no token yet, or stop strings: read at every token
        self._sampled: list[Request] = []  # requests that got a token since the last `make_text`
        self._ended: list[Request] = []  # requests that such a token ended
        self._unsent: dict[Request, None] = {}  # requests with unsent tokens, longest wait first
        self._events: list[Event] = []
        self._allowance = float(MAX_BURST)  # messages that may be sent now
        self._refilled = clock()

    def __len__(self) -> int:
        return len(self._families)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._families

    def __iter__(self) -> Iterator[Answer]:
        return iter(list(self._answers.values()))

    def family(self, request_id: str) -> list[Answer]:
        """The live siblings of a request."""
        return list(self._families.get(request_id, {}).values())

    def add(
        self,
        request: Request,
        text: OutputText | None,
        is_streamed: bool = True,
        unsent_text: str = "",
    ) -> None:
        """`unsent_text` is what is left of the text of a resumed answer's tokens, which `text` has
        read and its client has."""
        last_delta = None if is_streamed else Delta(request.request_id, request.index, [], "")
        answer = Answer(request, text, last_delta, self._clock(), unsent_text=unsent_text)
        answer.num_resumed = answer.num_read = answer.num_sent = request.num_output_tokens
        self._families.setdefault(request.request_id, {})[request.index] = answer
        self._answers[request] = answer
        self._eager.add(request)

    def note_scheduled(self, request: Request) -> None:
        """The request was given a row, and so were its siblings."""
        for answer in self.family(request.request_id):
            if answer.scheduled is None:
                answer.scheduled = self._clock()

    def note_sampled(self, sampled: list[Request], ended: list[Request]) -> None:
        """Records which requests got a token and which ended; `make_text` makes the events."""
        self._sampled += sampled
        self._ended += ended

    def make_text(self, finish: Callable[[Request], None]) -> None:
        """Makes the deltas that are due, and Finished for requests that have ended.

        `finish` is called for a request that is still running when its text has a stop string.
        """
        sampled, self._sampled = dict.fromkeys(self._sampled), []
        ended, self._ended = self._ended, []
        self._unsent.update(sampled)  # those already in line keep their places
        for request in filter(self._eager.__contains__, sampled):
            answer = self._answers[request]
            self._read(answer)
            if answer.text is not None and answer.text.matched_stop is not None:
                if request.finish_reason is None:
                    finish(request)
                ended.append(request)
            elif answer.first_token is None:
                answer.first_token = self._clock()
                if not answer.is_held_back:
                    self._send(answer)
            if answer.text is None or not answer.text.seeks_stop:
                self._eager.remove(request)
        for request in ended:
            if request in self._answers:
                self.finish(self._answers[request])
        self._send_due()

    def finish(self, answer: Answer) -> None:
        """Sends the rest of an answer whose request has ended, and its Finished."""
        self._read(answer)
        if answer.text is not None:
            answer.unsent_text += answer.text.finish()
        self._send(answer)
        self._remove(answer)
        self._events.append(self._finished(answer))

    def fail(self, request_id: str, error: ChairliftError) -> None:
        """Ends a live request with all its siblings."""
        for answer in self.family(request_id):
            self._read(answer)
            self._send(answer)
            self._remove(answer)
        self._events.append(Failed(request_id, error))

    def refuse(self, request_id: str, error: ChairliftError) -> None:
        """Fails a request that was never accepted."""
        self._events.append(Failed(request_id, error))

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _read(self, answer: Answer) -> None:
        """Turns the tokens that have come into text, up to a stop string."""
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
            answer.unsent_text += text.push_all(shown)
            return
        for place, token_id in enumerate(shown, 1):
            answer.unsent_text += text.push(token_id)
            if text.matched_stop is not None:
                answer.num_read -= len(tokens) - place
                return

    def _send_due(self) -> None:
        """Sends as many deltas as the rate allows, to clients that have taken their last one."""
        now = self._clock()
        refill = (now - self._refilled) * MESSAGES_PER_SECOND
        self._allowance = min(self._allowance + refill, MAX_BURST)
        self._refilled = now
        self.is_behind = False
        for request in list(self._unsent):
            answer = self._answers[request]
            if answer.is_held_back:
                continue
            if self._allowance < 1:
                self.is_behind = True
                return
            self._read(answer)
            self._send(answer)

    def _send(self, answer: Answer) -> None:
        """Makes a delta of everything read and not sent."""
        request = answer.request
        self._unsent.pop(request, None)
        begin = request.num_prompt_tokens
        tokens = request.token_ids[begin + answer.num_sent : begin + answer.num_read]
        prompt_scores = self._owed_prompt_scores(answer)
        if not tokens and not answer.unsent_text and not prompt_scores:
            return
        delta = Delta(request.request_id, request.index, tokens, answer.unsent_text)
        if request.scores:
            skip = answer.num_resumed
            delta.logprobs = request.scores[answer.num_sent - skip : answer.num_read - skip]
        if prompt_scores:
            delta.prompt_logprobs = prompt_scores
        answer.last_delta = delta
        self._events.append(delta)
        self._allowance -= 1
        answer.num_sent = answer.num_read
        answer.unsent_text = ""

    def _owed_prompt_scores(self, answer: Answer) -> list[TokenScore]:
        """With the first delta, unless the request ended before all of its prompt was computed."""
        request = answer.request
        if not answer.owes_prompt_scores or len(request.prompt_scores) < (
            request.num_prompt_tokens - 1
        ):
            return []
        answer.owes_prompt_scores = False
        return request.prompt_scores

    def _remove(self, answer: Answer) -> None:
        request = answer.request
        del self._answers[request]
        self._eager.discard(request)
        self._unsent.pop(request, None)
        if self._sampled:  # it, or a sibling, fails with the step that gave it a token
            self._sampled = [other for other in self._sampled if other is not request]
        family = self._families[request.request_id]
        del family[request.index]
        if not family:
            del self._families[request.request_id]

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
            completion_tokens=answer.num_sent,
            cached_tokens=request.num_cached_tokens,
            queued_seconds=scheduled - answer.submitted,
            prefill_seconds=first_token - scheduled,
            decode_seconds=now - first_token,
            preemptions=request.num_preemptions,
            drafted_tokens=request.num_drafted,
            accepted_tokens=request.num_accepted,
            beam_score=request.beam_score,
        )
