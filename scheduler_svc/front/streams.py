"""Live requests as the edge sees them: events from the engine's thread to the gRPC handlers.

The engine delivers its events once per step; one hand-over into the event loop brings them all,
and each goes to the stream of its request. A stream holds at most one delta per sibling that
nobody has taken yet: what comes meanwhile is merged into it, so that a slow client costs no memory
but its text.

An id is live from `open` until the engine has said how the request ended (Finished for every
sibling, or Failed), even when its client has gone before: otherwise late events of the first
request could reach a second one of the same id.

Everything but `deliver` belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from scheduler_svc.core.request import FinishReason
from scheduler_svc.engine.events import Delta, Event, Failed, Finished
from scheduler_svc.errors import ChairliftError, DuplicateRequest

EVENTS_PER_TURN: Final = 8  # of the event loop; a write takes some 100 µs


@dataclass(slots=True)
class _Sibling:
    """What has come for one sibling and was not taken yet, and its end."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # one per delta, so that empty text is news
    end: Finished | None = None


class LiveStream:
    """One request's events, for the one handler that waits for them."""

    def __init__(self, request_id: str, num_siblings: int = 1) -> None:
        self.request_id = request_id
        self.num_siblings = num_siblings
        self.arrival = time.monotonic()
        self.is_submitted = False  # the engine knows it, and will tell how it ends
        self.ended = asyncio.Event()
        self._failure: Failed | None = None
        self._siblings: dict[int, _Sibling] = {}  # those of which anything has come
        self._num_finished = 0
        self._fresh: dict[int, None] = {}  # siblings with news; who has waited longest is first
        self._reader: asyncio.Future[None] | None = None  # waits for news

    @property
    def has_ended(self) -> bool:
        """Every sibling has, or the request has failed."""
        return self.ended.is_set()

    @property
    def is_complete(self) -> bool:
        """Every sibling has ended, and nothing failed."""
        return self._num_finished == self.num_siblings

    def put(self, event: Event) -> None:
        """Keeps an event for the handler, and wakes it."""
        if isinstance(event, Failed):
            self._failure = event
            self.ended.set()
        else:
            sibling = self._siblings.get(event.index)
            if sibling is None:
                sibling = self._siblings[event.index] = _Sibling()
            if isinstance(event, Delta):
                sibling.token_ids += event.token_ids
                sibling.texts.append(event.text)
            else:
                sibling.end = event
                self._num_finished += 1
                if self.is_complete:
                    self.ended.set()
            self._fresh[event.index] = None
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def end_unseen(self) -> None:
        """Ends every sibling as aborted: the engine never knew the request."""
        for index in range(self.num_siblings):
            self.put(ended_unseen(self.request_id, index))

    async def next(self) -> Delta | Finished | None:
        """What has come for one of the siblings: all its tokens and text since it was its turn
        last as one Delta, or its end. None when all of it has been taken.

        Raises what failed the request, once all that was said before has been taken.
        """
        while not self._fresh and not self.has_ended:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._fresh:
            return self._take(next(iter(self._fresh)))
        if self._failure is not None:
            raise self._failure.error
        return None

    async def whole(self) -> list[tuple[Delta, Finished]]:
        """Everything of every sibling, by index, when all have ended. Raises what failed it."""
        await self.ended.wait()
        if self._failure is not None:
            raise self._failure.error
        answers = []
        for index, sibling in sorted(self._siblings.items()):
            assert sibling.end is not None, f"sibling {index} of {self.request_id} has no end"
            answers.append((self._delta(index, sibling), sibling.end))
        return answers

    def _take(self, index: int) -> Delta | Finished:
        """The next event of a sibling that has news; it goes to the end of the line."""
        sibling = self._siblings[index]
        del self._fresh[index]
        if not sibling.texts:
            assert sibling.end is not None, f"stream {self.request_id} woke up without news"
            return sibling.end
        if sibling.end is not None:
            self._fresh[index] = None
        return self._delta(index, sibling)

    def _delta(self, index: int, sibling: _Sibling) -> Delta:
        delta = Delta(self.request_id, index, sibling.token_ids, "".join(sibling.texts))
        sibling.token_ids = []
        sibling.texts = []
        return delta


class LiveStreams:
    """Every live request, in arrival order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._streams: dict[str, LiveStream] = {}
        self._waiting_here: dict[str, LiveStream] = {}  # those that the engine does not know yet
        self._backlog: deque[Event] = deque()  # delivered, not given to its stream yet
        self._abandoned: set[str] = set()  # their clients have gone, the engine has not said so
        self._refusal: ChairliftError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request_id: str, num_siblings: int = 1) -> LiveStream:
        """Raises DuplicateRequest, or what `refuse` was given."""
        if self._refusal is not None:
            raise self._refusal
        if request_id in self._streams:
            raise DuplicateRequest(request_id)
        stream = LiveStream(request_id, num_siblings)
        self._streams[request_id] = self._waiting_here[request_id] = stream
        self._idle.clear()
        return stream

    def close(self, stream: LiveStream) -> None:
        """Its handler has ended, for whatever reason."""
        if stream.is_submitted and not stream.has_ended:
            self._abandoned.add(stream.request_id)
        else:
            self._forget(stream.request_id)

    def get(self, request_id: str) -> LiveStream | None:
        return self._streams.get(request_id)

    def submitted(self, stream: LiveStream) -> None:
        """The engine knows the request from now on, and will say how it ends."""
        stream.is_submitted = True
        del self._waiting_here[stream.request_id]

    def waiting_here(self) -> Collection[LiveStream]:
        """Those that the engine does not know yet; good until the next one comes or goes."""
        return self._waiting_here.values()

    @property
    def is_refusing(self) -> bool:
        """Whether new requests get the error that `refuse` was given."""
        return self._refusal is not None

    def refuse(self, error: ChairliftError) -> None:
        """From now on every new request ends with this error."""
        self._refusal = error

    def fail_waiting(self, error: ChairliftError) -> None:
        """Those that the engine does not know yet: nothing of them is lost by trying elsewhere."""
        for stream in self.waiting_here():
            if not stream.has_ended:
                stream.put(Failed(stream.request_id, error))

    def fail_all(self, error: ChairliftError) -> None:
        for request_id, stream in self._streams.items():
            if not stream.has_ended:
                stream.put(Failed(request_id, error))

    async def wait_idle(self) -> None:
        """Until no request is live."""
        await self._idle.wait()

    def deliver(self, events: Sequence[Event]) -> None:
        """From any thread. Events of unknown requests are dropped: their handlers have ended."""
        self._loop.call_soon_threadsafe(self._take_in, events)

    def _take_in(self, events: Sequence[Event]) -> None:
        is_idle = not self._backlog
        self._backlog.extend(events)
        if is_idle:
            self._dispatch()

    def _dispatch(self) -> None:
        """Some of the events now, the others after what else the loop has to do: a call that is
        just coming in takes a dozen turns of the loop, and would wait for all writes in each."""
        for _ in range(min(EVENTS_PER_TURN, len(self._backlog))):
            event = self._backlog.popleft()
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            if event.request_id not in self._abandoned:
                stream.put(event)
            elif not isinstance(event, Delta):
                stream.put(event)
                if stream.has_ended:
                    self._forget(event.request_id)
        if self._backlog:
            self._loop.call_soon(self._dispatch)

    def _forget(self, request_id: str) -> None:
        self._abandoned.discard(request_id)
        self._waiting_here.pop(request_id, None)
        del self._streams[request_id]
        if not self._streams:
            self._idle.set()


def ended_unseen(request_id: str, index: int = 0) -> Finished:
    """How a sibling ends whose request was aborted before the engine knew it."""
    return Finished(
        request_id,
        index,
        FinishReason.ABORT,
        stop_token_id=None,
        stop_string=None,
        prompt_tokens=0,
        completion_tokens=0,
        cached_tokens=0,
        queued_seconds=0.0,
        prefill_seconds=0.0,
        decode_seconds=0.0,
        preemptions=0,
    )
