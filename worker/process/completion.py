"""The thread that waits for steps and sends their results, while the next step is launched.

Everything that a session is told about steps goes through here, faults too, so that it comes in
the order of the plans.

Owns: that order, and what the heartbeats say is running. Does not own: launching (loop.py).
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from protos.plan import StepResult
from worker.process.device_failure import DeviceFailed
from worker.process.link import SchedulerLink, Session

logger = logging.getLogger(__name__)


class LaunchedStep(Protocol):
    """A step that has begun on the device."""

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
    """For one session. `finish` must be called before another session begins."""

    def __init__(self, link: SchedulerLink, session: Session) -> None:
        self._link = link
        self._session = session
        self._queue: queue.SimpleQueue[_Step | _Fault | None] = queue.SimpleQueue()
        self._running: deque[int] = deque()  # step ids, the oldest first
        self._lock = threading.Lock()  # what runs and what the heartbeats say change together
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="completion", daemon=True)
        self._thread.start()

    def begin(self, step_id: int) -> None:
        """The step is about to be launched."""
        with self._lock:
            self._running.append(step_id)
            self._say_what_runs()

    def add(self, launched: LaunchedStep, queue_microseconds: int) -> None:
        """The step that `begin` named last is launched; it waited so long before."""
        self._queue.put(_Step(launched, queue_microseconds))

    def fault(self, step_id: int, error: str) -> None:
        """The step has failed, or was never begun; said once all earlier ones are answered."""
        self._queue.put(_Fault(step_id, error))

    def finish(self) -> None:
        """Waits until everything is answered. Raises DeviceFailed."""
        self._queue.put(None)
        self._thread.join()
        if self._failure is not None:
            raise DeviceFailed(str(self._failure)) from self._failure

    # In the thread

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._failure is not None:
                continue  # what was launched upon the failed step means nothing
            if isinstance(item, _Fault):
                self._end(item.step_id)
                self._session.send_fault(item.step_id, item.error)
                continue
            try:
                result = item.launched.wait()
            except Exception as error:
                logger.critical("a launched step failed: %s", error, exc_info=error)
                self._failure = error
                # ends the session, too
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
            self._say_what_runs()

    def _say_what_runs(self) -> None:
        if self._running:
            self._link.set_busy("step", self._running[0])
        else:
            self._link.set_busy("idle")
