"""The stream of one request's answer, for asyncio."""

# client/make_blocking.py derives client/blocking_stream.py from this file.

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from time import monotonic
from typing import Any, Self

from client.answers import Answer, Completion, Delta, Started, Usage
from client.calls import AsyncCalls
from client.errors import ChairliftError, from_rpc_error
from client.resuming import Course, Leg
from protos import inference_pb2


class AsyncTokenStream(AsyncIterator[Delta]):
    """The deltas of one request as they arrive; everything received so far stays readable.

    The request is already running. Leaving early cancels it: by `cancel()`, at the end of its
    `async with` block, or when the stream is dropped (a `break` out of the loop). If the server is
    lost, the stream waits and goes on: client/resuming.py says how.
    """

    def __init__(
        self,
        start: Callable[[inference_pb2.GenerateRequest, float | None], Any],
        address: str,
        request: inference_pb2.GenerateRequest,
        retries: int,
        timeout: float | None,
    ) -> None:
        """Made by the client's `generate`. `start` makes one call that ends within so many seconds;
        it also keeps the client alive while the stream is read."""
        self._start = start
        self._address = address
        self._calls = AsyncCalls()
        self._error: ChairliftError | None = None
        deadline = None if timeout is None else monotonic() + timeout
        self._course = Course(request, retries, deadline)
        self._transcript = self._course.transcript
        self._call(self._course.first())

    async def __anext__(self) -> Delta:
        if self._error is not None:
            raise self._error
        try:
            while (arrival := await self._calls.read()) is not None:
                if arrival.error is not None:
                    error = from_rpc_error(arrival.error, self._address)
                    await self._carry_on(arrival.leg, error)
                elif arrival.response is not None:
                    delta = self._course.absorb(arrival.leg, arrival.response)
                    if delta is not None:
                        return delta
        except ChairliftError as error:
            self._error = error
            self._calls.cancel()
            raise
        raise StopAsyncIteration

    async def _carry_on(self, leg: Leg, error: ChairliftError) -> None:
        seconds, legs = self._course.after(leg, error, monotonic())
        if legs:
            await self._calls.pause(seconds)
        for successor in legs:
            self._call(successor)

    def _call(self, leg: Leg) -> None:
        timeout = self._course.remaining(monotonic())
        self._calls.add(leg, self._start(leg.request, timeout))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Aborts the request and ends iteration. Does nothing once the request has ended."""
        self._calls.cancel()

    @property
    def started(self) -> Started | None:
        """Request id, seed and model; None until the first response has been read."""
        return self._transcript.started

    @property
    def completions(self) -> dict[int, Completion]:
        """How each finished sibling ended, by index."""
        return self._transcript.completions

    @property
    def finish_reason(self) -> str | None:
        """The first sibling's finish reason; None while it runs."""
        completion = self.completions.get(0)
        return completion.finish_reason if completion else None

    @property
    def usage(self) -> Usage | None:
        """The first sibling's token counts; None while it runs."""
        completion = self.completions.get(0)
        return completion.usage if completion else None

    async def text(self, index: int = 0) -> str:
        """Reads to the end; the whole text of one sibling."""
        async for _ in self:
            pass
        return self._transcript.text(index)

    async def answers(self) -> list[Answer]:
        """Reads to the end; the answers of all siblings, by index."""
        async for _ in self:
            pass
        return self._transcript.answers()
