"""Ends the process when a step exceeds its time limit, and pings systemd's watchdog until then.

A step that hangs (in a deadlock, in a driver) cannot be cancelled from within, but a new process
can take over the requests. Time is added up poll by poll, so that a process that was stopped and
continued does not find its step overdue. Waiting for a mask does not count: the scheduler is late
then, not the worker. A hang that holds the interpreter's lock stops this thread, too: then the
pings stop, and systemd ends the process (WatchdogSec=).

Owns: this decision. Does not own: which step is running (completion.py reports it to the link).
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

POLL_SECONDS: Final = 0.5
REPORT_SECONDS: Final = 5.0  # for writing the report to the log
EXIT_STEP_HANGS: Final = 1  # as after any failure: a new process may succeed


def _end_process() -> None:
    os._exit(EXIT_STEP_HANGS)


class Watchdog:
    """Polls the link's busy state from a thread of its own, from `start` to `stop`.

    `limit` is in seconds; 0 = no limit. It may be set at any time.
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
        self._poll_seconds = POLL_SECONDS
        if self._pings:
            self._poll_seconds = min(POLL_SECONDS, int(microseconds) / 4e6)
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping.set()
        self._thread.join()

    def _run(self) -> None:
        seconds, running, before = 0.0, None, time.monotonic()
        while not self._is_stopping.wait(self._poll_seconds):
            now = time.monotonic()
            busy, step_id, _ = self._link.busy
            if busy != "step" or step_id != running:
                seconds, running = 0.0, step_id if busy == "step" else None
            else:
                seconds += min(now - before, 2 * self._poll_seconds)
            before = now
            if 0 < self.limit < seconds:
                self._give_up(step_id, seconds)
                return
            if self._pings:
                systemd.notify("WATCHDOG=1")

    def _give_up(self, step_id: int, seconds: float) -> None:
        # in another thread: the step may hang while it writes a log line and holds the log's lock
        report = threading.Thread(target=self._report, args=(step_id, seconds), daemon=True)
        report.start()
        report.join(REPORT_SECONDS)
        self._end_process()

    def _report(self, step_id: int, seconds: float) -> None:
        logger.critical(
            "step %d has run for %.1f s, longer than step_timeout (%g s): ending this process, so "
            "that a new one takes over; its threads were at:",
            step_id,
            seconds,
            self.limit,
        )
        faulthandler.dump_traceback(all_threads=True)
