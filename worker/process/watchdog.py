"""Ends the process when a step outlives its limit, and pings systemd's watchdog until then.

A step that hangs (a deadlock, a driver) cannot be ended from within; a new process can take the
requests over. Time is added up look by look, so that a process that was stopped and goes on does
not find its step overdue. A hang that holds the interpreter's lock stops this thread, too: then
no ping comes, and systemd ends the process (WatchdogSec=).

Owns: that decision. Does not own: what is running (completion.py says it to the link).
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from worker.process import systemd
from worker.process.link import SchedulerLink

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.5
REPORT_SECONDS: Final = 5.0  # for the log to take what is told of it
EXIT_STEP_HANGS: Final = 1  # as after any failure: a new process may do better


def _end_process() -> None:
    os._exit(EXIT_STEP_HANGS)


class Watchdog:
    """Looks at the link's busy state from a thread of its own, from `start` to `stop`.

    `limit` is in seconds; 0 = steps may take for ever. It may be set at any time.
    """

    def __init__(
        self,
        link: SchedulerLink,
        end_process: Callable[[], None] = _end_process,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.limit = 0.0
        self._link = link
        self._end_process = end_process
        microseconds = environ.get("WATCHDOG_USEC", "")
        self._pings = microseconds.isdigit() and environ.get("WATCHDOG_PID", "") in (
            "",
            str(os.getpid()),
        )
        self._look_seconds = LOOK_SECONDS
        if self._pings:
            self._look_seconds = min(LOOK_SECONDS, int(microseconds) / 4e6)
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping.set()
        self._thread.join()

    def _run(self) -> None:
        seconds, running, before = 0.0, None, time.monotonic()
        while not self._is_stopping.wait(self._look_seconds):
            now = time.monotonic()
            busy, step_id, _ = self._link.busy
            if busy != "step" or step_id != running:
                seconds, running = 0.0, step_id if busy == "step" else None
            else:
                seconds += min(now - before, 2 * self._look_seconds)
            before = now
            if 0 < self.limit < seconds:
                self._give_up(step_id, seconds)
                return
            if self._pings:
                systemd.notify("WATCHDOG=1")

    def _give_up(self, step_id: int, seconds: float) -> None:
        # beside this thread: the step may hang in the midst of a log line, with the log's lock
        report = threading.Thread(target=self._report, args=(step_id, seconds), daemon=True)
        report.start()
        report.join(REPORT_SECONDS)
        self._end_process()

    def _report(self, step_id: int, seconds: float) -> None:
        logger.critical(
            "step %d has run for %.1f s, longer than step_timeout (%g s): this process ends, and "
            "a new one is to take over; its threads were at:",
            step_id,
            seconds,
            self.limit,
        )
        faulthandler.dump_traceback(all_threads=True)
