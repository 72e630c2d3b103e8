"""Summaries of steps, from the engine's thread to the watchers (Admin.WatchSteps).

The engine reports every plan and every result, which costs nothing without watchers. Each watcher
has its own bounded queue: a slow one misses the oldest reports, and `missed` counts them.

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
    """A step whose result has arrived; times in seconds."""

    view: StepView
    start_seconds: float  # when the plan was sent, since the feed was made
    seconds: float  # until the result was absorbed
    device_seconds: float


class Watcher:
    """The reports that one watcher has not read yet."""

    def __init__(self) -> None:
        self.missed = 0
        self._loop = asyncio.get_running_loop()
        self._reports: deque[StepReport] = deque()
        self._news = asyncio.Event()

    def offer(self, report: StepReport) -> None:
        """Called in the engine's thread."""
        self._loop.call_soon_threadsafe(self._put, report)

    def _put(self, report: StepReport) -> None:
        if len(self._reports) == QUEUE_LENGTH:
            self._reports.popleft()
            self.missed += 1
        self._reports.append(report)
        self._news.set()

    async def next(self) -> StepReport:
        """Waits for a report if there is none; the oldest one."""
        while not self._reports:
            self._news.clear()
            await self._news.wait()
        return self._reports.popleft()


class StepFeed:
    """Distributes the engine's reports to the watchers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._watchers: tuple[Watcher, ...] = ()  # replaced as a whole: two threads read it
        self._planned: dict[int, tuple[StepView, float]] = {}  # by id; no result yet

    @contextmanager
    def watch(self) -> Iterator[Watcher]:
        """Needs a running event loop."""
        watcher = Watcher()
        self._watchers = (*self._watchers, watcher)
        try:
            yield watcher
        finally:
            self._watchers = tuple(other for other in self._watchers if other is not watcher)

    def planned(self, state: State, step: InFlight) -> None:
        """The plan of this step has just been sent."""
        if step.step_id == 0:  # a new session: plans sent to a lost worker get no result
            self._planned.clear()
        if self._watchers:
            sent = self._clock()
            self._planned[step.step_id] = (view_step(state, step), sent)

    def returned(self, step_id: int, device_microseconds: int) -> None:
        """The result of this step has arrived; ignored if nobody watched when it was planned."""
        for lost in [step for step in self._planned if step < step_id]:
            del self._planned[lost]  # discarded after a Fault
        planned = self._planned.pop(step_id, None)
        if planned is None:
            return
        view, sent = planned
        report = StepReport(
            view, sent - self._start, self._clock() - sent, device_microseconds / 1e6
        )
        for watcher in self._watchers:
            watcher.offer(report)
