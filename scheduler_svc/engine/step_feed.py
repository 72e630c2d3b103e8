"""Summaries of steps, from the engine's thread to whoever watches (Admin.WatchSteps).

The engine tells of every plan and of every result; without watchers that costs nothing. Each
watcher has a queue of its own with a bound: a slow one misses the oldest, and is told how many.

`planned` and `returned` belong to the engine's thread, a watcher to the event loop's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from scheduler_svc.core.state import InFlight, State
from scheduler_svc.engine.step_view import StepView, view_step

QUEUE_LENGTH: Final = 1024


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step whose result is back."""

    view: StepView
    start_seconds: float  # when the plan was sent, since the feed was made
    seconds: float  # until the result was taken in
    device_seconds: float


class Watcher:
    """What one watcher has not taken yet."""

    def __init__(self) -> None:
        self.missed = 0
        self._loop = asyncio.get_running_loop()
        self._reports: deque[StepReport] = deque()
        self._news = asyncio.Event()

    def offer(self, report: StepReport) -> None:
        """From the engine's thread."""
        self._loop.call_soon_threadsafe(self._put, report)

    def _put(self, report: StepReport) -> None:
        if len(self._reports) == QUEUE_LENGTH:
            self._reports.popleft()
            self.missed += 1
        self._reports.append(report)
        self._news.set()

    async def next(self) -> StepReport:
        """The oldest report; waits for one."""
        while not self._reports:
            self._news.clear()
            await self._news.wait()
        return self._reports.popleft()


class StepFeed:
    """Hands out what the engine tells."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._watchers: tuple[Watcher, ...] = ()  # replaced as a whole: two threads read it
        self._planned: dict[int, tuple[StepView, float]] = {}  # by step, without a result yet

    @contextmanager
    def watch(self) -> Iterator[Watcher]:
        """Inside a running event loop."""
        watcher = Watcher()
        self._watchers = (*self._watchers, watcher)
        try:
            yield watcher
        finally:
            self._watchers = tuple(other for other in self._watchers if other is not watcher)

    def planned(self, state: State, step: InFlight) -> None:
        """The plan of this step has just been sent."""
        if step.step_id == 0:  # a new session: what a lost worker was sent does not return
            self._planned.clear()
        if self._watchers:
            sent = self._clock()
            self._planned[step.step_id] = (view_step(state, step), sent)

    def returned(self, step_id: int, device_microseconds: int) -> None:
        """The result of this step is here; of one that nobody watched nothing is told."""
        for lost in [step for step in self._planned if step < step_id]:
            del self._planned[lost]  # given up after a Fault
        planned = self._planned.pop(step_id, None)
        if planned is None:
            return
        view, sent = planned
        report = StepReport(
            view, sent - self._start, self._clock() - sent, device_microseconds / 1e6
        )
        for watcher in self._watchers:
            watcher.offer(report)
