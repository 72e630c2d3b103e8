"""`chairlift serve`: one scheduler and one worker on this machine, and their common end.

Owns the two child processes, nothing of what they do. A worker that dies is started again after a
pause, for the scheduler carries its requests over; an end of the scheduler, or a worker that says
that coming back will not help, ends both.

Signals: children run in process groups of their own, so that a Ctrl-C in the terminal reaches this
process alone and the order is ours: first the scheduler, which still needs its worker while it
drains, then the worker. A second Ctrl-C kills both.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from client import launch

FATAL_EXIT_CODE: Final = 2  # of a worker that was asked for what it can never do
_FIRST_PAUSE = 0.5  # seconds before a dead worker is started again; doubles with each death …
_LONGEST_PAUSE = 15.0
_HEALTHY_AFTER = 60.0  # … until one has lived this long
_KILL_AFTER = 10.0  # seconds that a worker gets to end by itself
_INTERRUPTED = 130
# A socket's address has 107 bytes, and /chairlift-abcdefgh/worker is below the place.
_MAX_PLACE_BYTES: Final = 107 - len("/chairlift-abcdefgh/worker")

_HELP = """\
usage: chairlift serve [scheduler options]

Starts the scheduler and a worker on this machine; one Ctrl-C stops both. All options are the
scheduler's. The two talk through a private socket unless --worker-address says otherwise.
"""


def main(arguments: list[str]) -> int:
    """Serves until stopped; the process's exit code."""
    scheduler_line = launch.command("scheduler", [])
    launch.command("worker", [])  # complains now, not after the scheduler has started
    if "-h" in arguments or "--help" in arguments:
        print(_HELP, flush=True)
        return subprocess.run([*scheduler_line, "--help"], check=False).returncode
    with worker_address(arguments) as (address, is_ours):
        own = ["--worker-address", address] if is_ours else []
        # first, so that whoever wants it otherwise can say so
        own_first = ["--exit-on-model-error=true"]
        return Supervisor(
            scheduler=launch.command("scheduler", [*own_first, *arguments, *own]),
            worker=launch.command("worker", ["--connect", address]),
        ).run()


@contextlib.contextmanager
def worker_address(arguments: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """The given --worker-address; or one in a folder that only this user can enter, and True."""
    given = None
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--worker-address":
            given = value if equals else "".join(arguments[position + 1 : position + 2])
    if given is not None:
        yield given, False
        return
    folder = _private_folder()
    try:
        yield f"ipc://{folder}/worker", True
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _private_folder() -> str:
    """A new one, whose name leaves room for a socket's: TMPDIR of a cluster may be too long.

    Raises LaunchError.
    """
    places = [os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp"]
    with contextlib.suppress(FileNotFoundError):  # where no folder can be written
        places.insert(0, tempfile.gettempdir())
    for place in places:
        if not place or len(os.fsencode(place)) > _MAX_PLACE_BYTES:
            continue
        with contextlib.suppress(OSError):
            return tempfile.mkdtemp(prefix="chairlift-", dir=place)
    raise launch.LaunchError(
        f"no folder for the socket between scheduler and worker: {', '.join(filter(None, places))} "
        f"cannot be written or have more than {_MAX_PLACE_BYTES} bytes; set TMPDIR to another "
        "one, or --worker-address to ipc://PATH"
    )


def restart_pause(deaths: int) -> float:
    """Seconds to wait after so many deaths in a row (at least one)."""
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(deaths - 1, 10))


class Supervisor:
    """Runs two command lines as one program. `run` must be called in the main thread, once."""

    def __init__(self, scheduler: list[str], worker: list[str]) -> None:
        self._scheduler_line = scheduler
        self._worker_line = worker
        self._worker: subprocess.Popen[bytes] | None = None  # None: between two lives
        self._worker_since = 0.0
        self._deaths = 0
        self._restart_at: float | None = None  # while there is no worker
        self._is_stopping = False
        self._exit_code: int | None = None  # decided before the scheduler has ended

    def run(self) -> int:
        """Until both have ended; the exit code for the whole."""
        with _signals() as wait:
            self._scheduler = launch.start(self._scheduler_line)
            self._start_worker()
            while self._scheduler.poll() is None:
                for number in wait(self._seconds_to_restart()):
                    if number == signal.SIGINT and self._is_stopping:
                        self._kill_both()
                    elif number in (signal.SIGINT, signal.SIGTERM):
                        self._stop()
                if self._scheduler.poll() is None:
                    self._look_after_worker()
            self._scheduler_ended()
            self._end_worker(wait)
        assert self._exit_code is not None
        return self._exit_code

    def _start_worker(self) -> None:
        self._worker = launch.start(self._worker_line)
        self._worker_since = time.monotonic()
        self._restart_at = None

    def _seconds_to_restart(self) -> float | None:
        return None if self._restart_at is None else max(0.0, self._restart_at - time.monotonic())

    def _stop(self) -> None:
        if not self._is_stopping:  # the kernel may tell of a parent's end more than once
            _say("stopping; running answers may finish. Ctrl-C kills both")
            self._is_stopping = True
            self._scheduler.terminate()

    def _kill_both(self) -> None:
        _say("killing both")
        self._exit_code = _INTERRUPTED
        _kill(self._scheduler)
        if self._worker is not None:
            _kill(self._worker)

    def _look_after_worker(self) -> None:
        """Also while the scheduler drains: what it still has to answer needs a worker."""
        now = time.monotonic()
        if self._restart_at is not None and now >= self._restart_at:
            self._start_worker()
        if self._worker is None or self._worker.poll() is None:
            return
        code = self._worker.returncode
        self._worker = None
        if self._exit_code is not None:  # killed, or given up
            return
        if code == FATAL_EXIT_CODE:
            _say(f"the worker cannot serve this ({_ending(code)}); stopping the scheduler")
            self._exit_code = code
            self._is_stopping = True
            self._scheduler.terminate()
            return
        self._deaths = 1 if now - self._worker_since >= _HEALTHY_AFTER else self._deaths + 1
        pause = restart_pause(self._deaths)
        _say(f"the worker ended ({_ending(code)}); starting it again in {pause:g} s")
        self._restart_at = now + pause

    def _scheduler_ended(self) -> None:
        code = self._scheduler.wait()
        if not self._is_stopping:
            _say(f"the scheduler ended ({_ending(code)}); stopping the worker")
        # One that was told to stop before it could listen for that ends by the signal itself.
        was_told = self._is_stopping and code == -signal.SIGTERM
        if self._exit_code is None:
            self._exit_code = 0 if was_told else _as_exit_code(code)

    def _end_worker(self, wait: Callable[[float | None], list[int]]) -> None:
        if self._worker is None:
            return
        self._worker.terminate()
        deadline = time.monotonic() + _KILL_AFTER
        while self._worker.poll() is None:
            left = deadline - time.monotonic()
            numbers = wait(max(0.0, left))
            if left <= 0 or signal.SIGINT in numbers:
                _say(f"the worker did not end within {_KILL_AFTER:g} s; killing it")
                _kill(self._worker)
                self._worker.wait()


def _say(text: str) -> None:
    """In one write, for the children print to the same terminal."""
    sys.stderr.write(f"chairlift: {text}\n")
    sys.stderr.flush()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The process and whatever it has started."""
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
    """As a shell reports it: a process that signal n has ended counts as 128 + n."""
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[float | None], list[int]]]:
    """A function that waits for SIGINT, SIGTERM or SIGCHLD, so many seconds at most."""
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
