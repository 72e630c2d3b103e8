"""The calls of one stream and what arrives on them, in a blocking and in an asyncio form.

A stream has one call; once it has been lost and its siblings are resumed, it has one for each.
Where the two forms of gRPC's API differ, both are here, so that client/aio.py can be the source of
both clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import grpc

from client.resuming import Leg


@dataclass(frozen=True, slots=True)
class Arrival:
    """A response, or how a call ended: with an error, or with neither."""

    leg: Leg
    response: Any | None = None
    error: grpc.RpcError | None = None


class Calls:
    """Running calls. One is read by whoever reads; of several, each has a thread that does.

    So it is with one, too, if the main thread reads: Ctrl-C interrupts only that thread, and gRPC's
    blocking reads do not always give back their locks then, which would lock the connection.
    """

    def __init__(self) -> None:
        self._calls: dict[Leg, Any] = {}
        is_main = threading.current_thread() is threading.main_thread()
        self._arrivals: SimpleQueue[Arrival] | None = SimpleQueue() if is_main else None
        self._cancelled = threading.Event()

    def add(self, leg: Leg, call: Any) -> None:
        """Adds a running call."""
        self._calls[leg] = call
        if self._arrivals is not None:
            self._pump(leg, self._arrivals)
        elif len(self._calls) > 1:
            self._arrivals = SimpleQueue()
            for other in self._calls:
                self._pump(other, self._arrivals)
        if self._cancelled.is_set():
            call.cancel()

    def read(self) -> Arrival | None:
        """What arrives next; None once all calls have ended, or after `cancel`."""
        if self._cancelled.is_set() or not self._calls:
            return None
        if self._arrivals is None:
            ((leg, call),) = self._calls.items()
            arrival = _read(leg, call)
        else:
            arrival = self._arrivals.get()
        if self._cancelled.is_set():
            return None
        if arrival.response is None:
            del self._calls[arrival.leg]
        return arrival

    def pause(self, seconds: float) -> None:
        """Waits; not longer than until `cancel`."""
        self._cancelled.wait(seconds)

    def cancel(self) -> None:
        """Aborts all calls and ends a pause; does nothing once they have ended."""
        self._cancelled.set()
        for call in list(self._calls.values()):
            call.cancel()

    def _pump(self, leg: Leg, arrivals: SimpleQueue[Arrival]) -> None:
        threading.Thread(target=_pump, args=(leg, self._calls[leg], arrivals), daemon=True).start()


def _read(leg: Leg, call: Any) -> Arrival:
    try:
        return Arrival(leg, next(call, None))
    except grpc.RpcError as error:
        return Arrival(leg, error=error)


def _pump(leg: Leg, call: Any, arrivals: SimpleQueue[Arrival]) -> None:
    while True:
        arrival = _read(leg, call)
        arrivals.put(arrival)
        if arrival.response is None:
            return


class AsyncCalls:
    """Running calls of asyncio. Cancelling the task that reads aborts them."""

    def __init__(self) -> None:
        self._calls: dict[Leg, Any] = {}
        self._arrivals: asyncio.Queue[Arrival] | None = None  # once there are several
        self._pumps: set[asyncio.Task[None]] = set()
        self._cancelled = asyncio.Event()

    def add(self, leg: Leg, call: Any) -> None:
        """Adds a running call."""
        self._calls[leg] = call
        if self._arrivals is not None:
            self._pump(leg, self._arrivals)
        elif len(self._calls) > 1:
            self._arrivals = asyncio.Queue()
            for other in self._calls:
                self._pump(other, self._arrivals)
        if self._cancelled.is_set():
            call.cancel()

    async def read(self) -> Arrival | None:
        """What arrives next; None once all calls have ended, or after `cancel`."""
        if self._cancelled.is_set() or not self._calls:
            return None
        try:
            if self._arrivals is None:
                ((leg, call),) = self._calls.items()
                arrival = await _read_async(leg, call)
            else:
                arrival = await self._arrivals.get()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._cancelled.is_set() and not (task is not None and task.cancelling()):
                return None  # our own cancel(), not the task's
            self.cancel()
            raise
        if self._cancelled.is_set():
            return None
        if arrival.response is None:
            del self._calls[arrival.leg]
        return arrival

    async def pause(self, seconds: float) -> None:
        """Waits; not longer than until `cancel`."""
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._cancelled.wait(), seconds)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Aborts all calls and ends a pause; does nothing once they have ended."""
        with contextlib.suppress(RuntimeError):  # their event loop is closed
            self._cancelled.set()
            for call in list(self._calls.values()):
                call.cancel()

    def _pump(self, leg: Leg, arrivals: asyncio.Queue[Arrival]) -> None:
        task = asyncio.ensure_future(_pump_async(leg, self._calls[leg], arrivals))
        self._pumps.add(task)  # the event loop itself holds no reference to a task
        task.add_done_callback(self._pumps.discard)


async def _read_async(leg: Leg, call: Any) -> Arrival:
    try:
        response = await call.read()
    except grpc.RpcError as error:
        return Arrival(leg, error=error)
    return Arrival(leg, None if response is grpc.aio.EOF else response)


async def _pump_async(leg: Leg, call: Any, arrivals: asyncio.Queue[Arrival]) -> None:
    while True:
        try:
            arrival = await _read_async(leg, call)
        except asyncio.CancelledError:  # the call's, or the task's
            arrival = Arrival(leg)
        arrivals.put_nowait(arrival)
        if arrival.response is None:
            return
