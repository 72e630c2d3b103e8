"""Live requests as the edge sees them: events from the engine's thread to the gRPC handlers.

The engine delivers its events once per step; one hand-over into the event loop brings them all,
and each goes to the stream of its request. A stream holds at most one delta that nobody has taken
yet: what comes meanwhile is merged into it, so that a slow client costs no memory but its text.

An id is live from `open` until the engine has said Finished or Failed, even when its client has
gone before: otherwise late events of the first request could reach a second one of the same id.

Everything but `deliver` belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from scheduler_svc.core.request import FinishReason
from scheduler_svc.errors import ChairliftError, DuplicateRequest
from scheduler_svc.events import Delta, Event, Failed, Finished


class LiveStream:
    """One request's events, for the one handler that waits for them."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.arrival = time.monotonic()
        self.is_submitted = False  # the engine knows it, and will tell how it ends
        self.ending: Finished | Failed | None = None
        self.ended = asyncio.Event()
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._news = asyncio.Event()

    def put(self, event: Event) -> None:
        if isinstance(event, Delta):
            self._token_ids += event.token_ids
            self._texts.append(event.text)
        else:
            self.ending = event
            self.ended.set()
        self._news.set()

    async def next(self) -> Event:
        """All tokens and text since the last call as one Delta; at last Finished or Failed."""
        while not self._texts and self.ending is None:
            self._news.clear()
            await self._news.wait()
        return self.take() or self._end()

    def take(self) -> Delta | None:
        """What has come, without waiting."""
        if not self._texts:
            return None
        delta = Delta(self.request_id, self._token_ids, "".join(self._texts))
        self._token_ids = []
        self._texts = []
        return delta

    def _end(self) -> Finished | Failed:
        if self.ending is None:
            raise AssertionError(f"stream {self.request_id} woke up without news")
        return self.ending


class LiveStreams:
    """Every live request, in arrival order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._streams: dict[str, LiveStream] = {}
        self._abandoned: set[str] = set()  # their clients have gone, the engine has not said so
        self._refusal: ChairliftError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request_id: str) -> LiveStream:
        """Raises DuplicateRequest, or what `refuse` was given."""
        if self._refusal is not None:
            raise self._refusal
        if request_id in self._streams:
            raise DuplicateRequest(request_id)
        stream = LiveStream(request_id)
        self._streams[request_id] = stream
        self._idle.clear()
        return stream

    def close(self, stream: LiveStream) -> None:
        """Its handler has ended, for whatever reason."""
        if stream.is_submitted and stream.ending is None:
            self._abandoned.add(stream.request_id)
        else:
            self._forget(stream.request_id)

    def get(self, request_id: str) -> LiveStream | None:
        return self._streams.get(request_id)

    def waiting_here(self) -> list[LiveStream]:
        """Those that the engine does not know yet."""
        return [stream for stream in self._streams.values() if not stream.is_submitted]

    def refuse(self, error: ChairliftError) -> None:
        """From now on every new request ends with this error."""
        self._refusal = error

    def fail_waiting(self, error: ChairliftError) -> None:
        """Those that the engine does not know yet: nothing of them is lost by trying elsewhere."""
        for stream in self.waiting_here():
            if stream.ending is None:
                stream.put(Failed(stream.request_id, error))

    def fail_all(self, error: ChairliftError) -> None:
        for request_id, stream in self._streams.items():
            if stream.ending is None:
                stream.put(Failed(request_id, error))

    async def wait_idle(self) -> None:
        """Until no request is live."""
        await self._idle.wait()

    def deliver(self, events: Sequence[Event]) -> None:
        """From any thread. Events of unknown requests are dropped: their handlers have ended."""
        self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: Sequence[Event]) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            if event.request_id not in self._abandoned:
                stream.put(event)
            elif not isinstance(event, Delta):
                self._forget(event.request_id)

    def _forget(self, request_id: str) -> None:
        self._abandoned.discard(request_id)
        del self._streams[request_id]
        if not self._streams:
            self._idle.set()


def ended_unseen(request_id: str) -> Finished:
    """How a request ends that was aborted before the engine knew it."""
    return Finished(
        request_id,
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
