"""Live requests on the API's side: events from the engine's thread to the gRPC handlers.

The engine delivers its events once per turn; one call into the event loop carries them all, and
each goes to the stream of its request. The engine sends a stream no further delta of a sibling
until the last one has been taken (answers.py), so a slow client costs no memory here.

An id is live from `open` until the engine has said how the request ended (Finished for every
sibling, or Failed), even when its client has disconnected before: otherwise late events of the
first request could reach a second one with the same id.

Everything but `deliver` belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, Final, TypeVar

from scheduler_svc.core.request import FinishReason
from scheduler_svc.engine.events import Delta, Event, Failed, Finished
from scheduler_svc.errors import ChairliftError, DuplicateRequest

T = TypeVar("T")

EVENTS_PER_TURN: Final = 8  # of the event loop; each may lead to a write, some 100 µs


class LiveStream:
    """One request's events, for the one handler that waits for them."""

    def __init__(self, request_id: str, num_siblings: int = 1, first_index: int = 0) -> None:
        self.request_id = request_id
        self.num_siblings = num_siblings
        self._first_index = first_index  # above 0 if a later sibling is resumed
        self.arrival = time.monotonic()
        self.prompt_token_ids: Sequence[int] = ()  # once the request has been validated
        self.is_submitted = False  # the engine knows the request, and will say how it ends
        self._ended = asyncio.Event()
        self._failure: ChairliftError | None = None
        self._events: deque[Delta | Finished] = deque()  # not taken yet
        self._num_finished = 0
        self._reader: asyncio.Future[None] | None = None  # waits for an event

    @property
    def has_ended(self) -> bool:
        """Every sibling has ended, or the request has failed."""
        return self._ended.is_set()

    @property
    def is_complete(self) -> bool:
        """Every sibling has ended, and nothing failed."""
        return self._num_finished == self.num_siblings

    def put(self, event: Event) -> None:
        """Queues an event for the handler, and wakes it."""
        if isinstance(event, Failed):
            self._failure = event.error
        else:
            self._events.append(event)
            self._num_finished += isinstance(event, Finished)
        if self._failure is not None or self.is_complete:
            self._ended.set()
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def abort(self) -> None:
        """Ends every sibling of a request that was not submitted."""
        for index in range(self.num_siblings):
            self.put(Finished(self.request_id, self._first_index + index, FinishReason.ABORT))

    async def unless_ended(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The coroutine's result; None when the request ends before there is one."""
        result = asyncio.ensure_future(work)
        end = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait([result, end], return_when=asyncio.FIRST_COMPLETED)
            return result.result() if result.done() else None
        finally:
            result.cancel()
            end.cancel()

    async def next(self) -> Delta | Finished | None:
        """The next event, as soon as there is one; None after the last.

        Raises the error that failed the request, after the events that came before it.
        """
        while not self._events and not self.has_ended:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._events:
            event = self._events.popleft()
            if isinstance(event, Delta):
                event.is_taken = True
            return event
        if self._failure is not None:
            raise self._failure
        return None

    async def whole(self) -> list[tuple[Delta, Finished]]:
        """The one delta (possibly empty) and the end of each sibling, by index, when all have
        ended. For requests submitted with `is_streamed` False. Raises what failed the request."""
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure
        deltas = {event.index: event for event in self._events if isinstance(event, Delta)}
        ends = [event for event in self._events if isinstance(event, Finished)]
        return [
            (deltas.get(end.index) or Delta(self.request_id, end.index, [], ""), end)
            for end in sorted(ends, key=lambda end: end.index)
        ]


class LiveStreams:
    """Every live request, in order of arrival."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._streams: dict[str, LiveStream] = {}
        self._unsubmitted: dict[str, LiveStream] = {}  # those that the engine does not know yet
        self._backlog: deque[Event] = deque()  # delivered, not passed to their streams yet
        self._abandoned: set[str] = set()  # handler has ended, the engine has not said how
        self._refusal: ChairliftError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request_id: str, num_siblings: int = 1, first_index: int = 0) -> LiveStream:
        """Raises DuplicateRequest, or the error given to `refuse`."""
        if self._refusal is not None:
            raise self._refusal
        if request_id in self._streams:
            raise DuplicateRequest(request_id)
        stream = LiveStream(request_id, num_siblings, first_index)
        self._streams[request_id] = self._unsubmitted[request_id] = stream
        self._idle.clear()
        return stream

    def close(self, stream: LiveStream) -> None:
        """The stream's handler has ended, for whatever reason."""
        if stream.is_submitted and not stream.has_ended:
            self._abandoned.add(stream.request_id)
        else:
            self._forget(stream.request_id)

    def get(self, request_id: str) -> LiveStream | None:
        return self._streams.get(request_id)

    def mark_submitted(self, stream: LiveStream) -> None:
        """The engine knows the request from now on, and will say how it ends."""
        stream.is_submitted = True
        del self._unsubmitted[stream.request_id]

    def unsubmitted(self) -> Collection[LiveStream]:
        """Requests that wait for the model or are being tokenised; a live view."""
        return self._unsubmitted.values()

    @property
    def is_refusing(self) -> bool:
        """Whether new requests fail with the error given to `refuse`."""
        return self._refusal is not None

    def refuse(self, error: ChairliftError) -> None:
        """Fails new requests from now on, and those not submitted yet: nothing of them is lost
        by trying elsewhere."""
        self._refusal = error
        self._fail(self._unsubmitted, error)

    def fail_all(self, error: ChairliftError) -> None:
        self._fail(self._streams, error)

    async def wait_idle(self) -> None:
        """Waits until no request is live."""
        await self._idle.wait()

    def deliver(self, events: Sequence[Event]) -> None:
        """Thread-safe. Events of unknown requests are dropped: their handlers have ended."""
        self._loop.call_soon_threadsafe(self._extend_backlog, events)

    def _extend_backlog(self, events: Sequence[Event]) -> None:
        is_idle = not self._backlog
        self._backlog.extend(events)
        if is_idle:
            self._dispatch()

    def _dispatch(self) -> None:
        """A few events now, the rest after whatever else the loop has to do: an incoming call
        takes a dozen turns of the loop, each of which would wait for all writes of a step."""
        for _ in range(min(EVENTS_PER_TURN, len(self._backlog))):
            event = self._backlog.popleft()
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            stream.put(event)
            if stream.has_ended and event.request_id in self._abandoned:
                self._forget(event.request_id)
        if self._backlog:
            self._loop.call_soon(self._dispatch)

    def _fail(self, streams: dict[str, LiveStream], error: ChairliftError) -> None:
        for stream in streams.values():
            if not stream.has_ended:
                stream.put(Failed(stream.request_id, error))

    def _forget(self, request_id: str) -> None:
        self._abandoned.discard(request_id)
        self._unsubmitted.pop(request_id, None)
        del self._streams[request_id]
        if not self._streams:
            self._idle.set()
