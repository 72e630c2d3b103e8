"""The thread that waits for steps and sends their results, while the next step is launched.

All messages about steps, faults too, go through this thread, so that they are sent in the order of
the plans.

Owns: that order, and which step heartbeats report. Does not own: launching (loop.py).
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from protos.plan import StepResult
from worker.process.device_failure import DeviceFailed
from worker.process.link import SchedulerLink
from worker.process.session import Session

logger = logging.getLogger(__name__)


class LaunchedStep(Protocol):
    """A step that runs on the device, or has finished there."""

    def wait(self) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class _Step:
    launched: LaunchedStep
    queue_microseconds: int


@dataclass(frozen=True, slots=True)
class _Fault:
    step_id: int
    error: str


class Completion:
    """The completion thread of one session. `finish` must be called before the next one begins."""

    def __init__(self, link: SchedulerLink, session: Session) -> None:
        self._link = link
        self._session = session
        self._queue: queue.SimpleQueue[_Step | _Fault | None] = queue.SimpleQueue()
        self._running: deque[int] = deque()  # step ids, the oldest first
        self._awaits_mask: int | None = None  # the step that can only wait for the scheduler
        self._lock = threading.Lock()  # _running and the link's busy state change together
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="completion", daemon=True)
        self._thread.start()

    def begin(self, step_id: int) -> None:
        """To be called before the step is launched."""
        with self._lock:
            self._running.append(step_id)
            self._report_busy()

    def add(self, launched: LaunchedStep, queue_microseconds: int) -> None:
        """Adds the step that `begin` named last, now launched; `queue_microseconds` is the time
        from its arrival to the launch."""
        self._queue.put(_Step(launched, queue_microseconds))

    def fault(self, step_id: int, error: str) -> None:
        """Reports that a step failed, or was never launched, after the results of all earlier
        steps."""
        self._queue.put(_Fault(step_id, error))

    @contextmanager
    def waiting_for_mask(self, step_id: int) -> Iterator[None]:
        """Around the wait for a mask: meanwhile the step is not the worker's to hurry, and
        heartbeats say so."""
        self._set_awaited(step_id)
        try:
            yield
        finally:
            self._set_awaited(None)

    def finish(self) -> None:
        """Waits until every launched step is answered; one that was begun, but not launched, never
        will be. Raises DeviceFailed."""
        self._queue.put(None)
        self._thread.join()
        with self._lock:
            self._running.clear()
            self._report_busy()
        if self._failure is not None:
            raise DeviceFailed(str(self._failure)) from self._failure

    # In the thread

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._failure is not None:
                continue  # steps launched after the failed one rest on its results
            if isinstance(item, _Fault):
                self._end(item.step_id)
                self._session.send_fault(item.step_id, item.error)
                continue
            try:
                result = item.launched.wait()
            except Exception as error:
                logger.critical("a launched step failed: %s", error, exc_info=error)
                self._failure = error
                # this also ends the session
                self._link.close(f"the device failed: {error}", is_failure=True)
                continue
            self._end(result.step_id)
            self._session.send_result(
                dataclasses.replace(result, queue_microseconds=item.queue_microseconds)
            )

    def _end(self, step_id: int) -> None:
        with self._lock:
            if step_id in self._running:
                self._running.remove(step_id)
            self._report_busy()

    def _set_awaited(self, step_id: int | None) -> None:
        with self._lock:
            self._awaits_mask = step_id
            self._report_busy()

    def _report_busy(self) -> None:
        if self._running and self._running[0] == self._awaits_mask:
            self._link.set_busy("mask", self._running[0])
        elif self._running:
            self._link.set_busy("step", self._running[0])
        else:
            self._link.set_busy("idle")
