"""The answers under way: each live request's text and times, and the events that tell of them.

Lives in the engine's thread. Sees to it that every accepted request ends in exactly one Finished
for each sibling, or in one Failed, and that nothing is told of it after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.errors import ChairliftError
from scheduler_svc.events import Delta, Event, Failed, Finished, TextStream


@dataclass(slots=True)
class Answer:
    """One live request or sibling; times by the engine's clock, in seconds."""

    request: Request
    text: TextStream | None
    submitted: float
    scheduled: float | None = None
    first_token: float | None = None
    num_tokens: int = 0  # told of so far
    num_faults: int = 0


class Answers:
    """All live answers, in order of arrival, and the events not delivered yet."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._live: dict[str, dict[int, Answer]] = {}  # request_id → index → answer
        self._of: dict[Request, Answer] = {}  # the same, for the way from a token to its text
        self._fresh: list[tuple[Request, int]] = []
        self._events: list[Event] = []

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

    def note_scheduled(self, request: Request) -> None:
        """The request has a row; those of its siblings have theirs too."""
        for answer in self.family(request.request_id):
            if answer.scheduled is None:
                answer.scheduled = self._clock()

    def add_tokens(self, tokens: list[tuple[Request, int]]) -> None:
        """Tokens that came back, in order; `make_text` turns them into deltas later."""
        self._fresh += tokens

    def make_text(self, finish: Callable[[Request], None]) -> None:
        """Deltas for all fresh tokens, and Finished for requests that ended with them.

        `finish` is called for a request that a stop string ends while it is still running.
        """
        fresh, self._fresh = self._fresh, []
        deltas: dict[Request, Delta] = {}
        ended: list[Answer] = []
        for request, token_id in fresh:
            answer = self._of.get(request)
            if answer is None:
                continue  # ended since: aborted, or by a stop string one token earlier
            if answer.first_token is None:
                answer.first_token = self._clock()
            answer.num_tokens += 1
            # all that the core has of an ended request has been told of
            has_ended = (
                request.finish_reason is not None and answer.num_tokens == request.num_output_tokens
            )
            added = ""
            if answer.text is not None:
                is_stop_token = has_ended and request.stop_token_id is not None
                if not is_stop_token or answer.text.include_stop_str_in_output:
                    added = answer.text.push(token_id)
                if answer.text.matched_stop is not None and not has_ended:
                    has_ended = True
                    if request.finish_reason is None:
                        finish(request)
                if has_ended:
                    added += answer.text.finish()
            delta = deltas.get(request)
            if delta is None:
                deltas[request] = Delta(request.request_id, request.index, [token_id], added)
            else:  # more than one step's result at once
                delta.token_ids.append(token_id)
                delta.text += added
            if has_ended:
                self._remove(answer)
                ended.append(answer)
        self._events += deltas.values()
        self._events += [self._finished(answer) for answer in ended]

    def end(self, answer: Answer) -> None:
        """Tells of a request that ended between two of its tokens (an abort)."""
        self._remove(answer)
        held_back = answer.text.finish() if answer.text is not None else ""
        if held_back:
            request = answer.request
            self._events.append(Delta(request.request_id, request.index, [], held_back))
        self._events.append(self._finished(answer))

    def fail(self, request_id: str, error: ChairliftError) -> None:
        """Ends a live request with all its siblings."""
        for answer in self.family(request_id):
            self._remove(answer)
        self._events.append(Failed(request_id, error))

    def refuse(self, request_id: str, error: ChairliftError) -> None:
        """Tells of a request that was never accepted."""
        self._events.append(Failed(request_id, error))

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _remove(self, answer: Answer) -> None:
        request = answer.request
        del self._of[request]
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
            completion_tokens=answer.num_tokens,
            cached_tokens=request.num_cached_tokens,
            queued_seconds=scheduled - answer.submitted,
            prefill_seconds=first_token - scheduled,
            decode_seconds=now - first_token,
            preemptions=request.num_preemptions,
        )
