"""Runs a scheduler and a worker, and perhaps a gateway before them, as one program.

Owns the child processes. A dead worker is restarted after a pause, since the scheduler keeps its
requests; all end when the scheduler or the gateway ends, or when a worker reports that a restart is
pointless.

Children run in process groups of their own, so that Ctrl-C in the terminal reaches this process
alone, which can stop them in order, each once those that need it have ended: the gateway, the
scheduler, the worker. A second Ctrl-C kills all.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

from client.processes import launch

FATAL_EXIT_CODE: Final = 2  # of a worker that can never serve what it was asked for
_FIRST_PAUSE: Final = 0.5  # seconds before a restart; doubles with each consecutive death …
_LONGEST_PAUSE: Final = 15.0
_HEALTHY_AFTER: Final = 60.0  # … and starts over once a worker has lived this many seconds
_KILL_AFTER: Final = 10.0  # seconds that a worker gets to stop by itself
_INTERRUPTED: Final = 130


def restart_pause(deaths: int) -> float:
    """Seconds to wait before the restart that follows `deaths` consecutive deaths (at least 1)."""
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(deaths - 1, 10))


class Supervisor:
    """Runs command lines as one program. Call `run` once, in the main thread."""

    def __init__(
        self, scheduler: list[str], worker: list[str], gateway: list[str] | None = None
    ) -> None:
        self._scheduler_line = scheduler
        self._worker_line = worker
        self._gateway_line = gateway
        self._gateway: subprocess.Popen[bytes] | None = None  # None once it has ended
        self._worker: subprocess.Popen[bytes] | None = None  # None while it is dead
        self._worker_started = 0.0  # time.monotonic()
        self._deaths = 0
        self._restart_at: float | None = None  # time.monotonic(), while there is no worker
        self._is_stopping = False
        self._exit_code: int | None = None  # if decided before the scheduler ends

    def run(self) -> int:
        """Returns the exit code once all processes have ended."""
        with _signals() as wait:
            self._scheduler = launch.start(self._scheduler_line)
            self._start_worker()
            if self._gateway_line is not None:
                self._gateway = launch.start(self._gateway_line)
            while self._scheduler.poll() is None:
                for number in wait(self._seconds_to_restart()):
                    if number == signal.SIGINT and self._is_stopping:
                        self._kill_all()
                    elif number in (signal.SIGINT, signal.SIGTERM):
                        self._stop()
                if self._scheduler.poll() is None:
                    self._check_gateway()
                    self._check_worker()
            self._scheduler_ended()
            for name, child in (("gateway", self._gateway), ("worker", self._worker)):
                if child is not None:
                    _end(name, child, wait)
        assert self._exit_code is not None
        return self._exit_code

    def _start_worker(self) -> None:
        self._worker = launch.start(self._worker_line)
        self._worker_started = time.monotonic()
        self._restart_at = None

    def _seconds_to_restart(self) -> float | None:
        return None if self._restart_at is None else max(0.0, self._restart_at - time.monotonic())

    def _stop(self) -> None:
        if self._is_stopping:  # the kernel may signal a parent's death repeatedly
            return
        _report("stopping after running answers finish; Ctrl-C kills all processes")
        self._is_stopping = True
        (self._gateway or self._scheduler).terminate()

    def _kill_all(self) -> None:
        _report("killing all processes")
        self._exit_code = _INTERRUPTED
        for child in (self._gateway, self._scheduler, self._worker):
            if child is not None:
                _kill(child)

    def _check_gateway(self) -> None:
        """Stops the scheduler once the gateway has ended, for whatever reason."""
        if self._gateway is None or self._gateway.poll() is None:
            return
        code, self._gateway = self._gateway.returncode, None
        if not self._is_stopping:
            _report(f"the gateway ended ({_ending(code)}); stopping the scheduler")
            self._exit_code = _as_exit_code(code) or 1
            self._is_stopping = True
        self._scheduler.terminate()

    def _check_worker(self) -> None:
        """Restarts a dead worker, also while the scheduler drains: running answers need it."""
        now = time.monotonic()
        if self._restart_at is not None and now >= self._restart_at:
            self._start_worker()
        if self._worker is None or self._worker.poll() is None:
            return
        code = self._worker.returncode
        self._worker = None
        if self._exit_code is not None:  # all are being stopped
            return
        if code == FATAL_EXIT_CODE:
            _report(f"the worker cannot serve this ({_ending(code)}); stopping the scheduler")
            self._exit_code = code
            self._is_stopping = True
            (self._gateway or self._scheduler).terminate()
            return
        self._deaths = 1 if now - self._worker_started >= _HEALTHY_AFTER else self._deaths + 1
        pause = restart_pause(self._deaths)
        _report(f"the worker ended ({_ending(code)}); restarting it in {pause:g} s")
        self._restart_at = now + pause

    def _scheduler_ended(self) -> None:
        code = self._scheduler.wait()
        if not self._is_stopping:
            _report(f"the scheduler ended ({_ending(code)}); stopping the others")
        # SIGTERM kills a scheduler that has not installed its handler yet.
        was_stopped = self._is_stopping and code == -signal.SIGTERM
        if self._exit_code is None:
            self._exit_code = 0 if was_stopped else _as_exit_code(code)


def _end(
    name: str, child: subprocess.Popen[bytes], wait: Callable[[float | None], list[int]]
) -> None:
    """Ends a child, at last by force."""
    child.terminate()
    deadline = time.monotonic() + _KILL_AFTER
    while child.poll() is None:
        left = deadline - time.monotonic()
        numbers = wait(max(0.0, left))
        if left <= 0 or signal.SIGINT in numbers:
            _report(f"the {name} did not stop within {_KILL_AFTER:g} s; killing it")
            _kill(child)
            child.wait()


def _report(text: str) -> None:
    """Prints a line in one write, because the children print to the same terminal."""
    sys.stderr.write(f"chairlift: {text}\n")
    sys.stderr.flush()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the whole process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


def _as_exit_code(code: int) -> int:
    """The exit code a shell reports: 128 + n if signal n ended the process."""
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[float | None], list[int]]]:
    """Yields a function that waits up to a number of seconds (None: forever) for SIGINT, SIGTERM
    or SIGCHLD and returns the signals received."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
    previous = {number: signal.signal(number, lambda *_: None) for number in handled}
    previous_fd = signal.set_wakeup_fd(writer.fileno())

    def wait(seconds: float | None) -> list[int]:
        ready, _, _ = select.select([reader], [], [], seconds)
        return list(reader.recv(4096)) if ready else []

    try:
        yield wait
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()
