"""Both real processes, as `chairlift serve` starts them, and what a test asks of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from client import Chairlift

STOP_SECONDS = 30


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`chairlift serve` with these options, ready when entered, stopped when left."""

    def __init__(
        self, log: Path, wait_seconds: float = 120, *, flags: Sequence[str] = (), **options: object
    ) -> None:
        self.port = free_port()
        self.address = f"localhost:{self.port}"
        self.log = log
        self._wait_seconds = wait_seconds
        self.line = [
            sys.executable,
            "-P",
            "-m",
            "client",
            "serve",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            *flags,
        ]
        for name, value in options.items():
            self.line += [
                f"--{name.replace('_', '-')}",
                str(value).lower() if isinstance(value, bool) else str(value),
            ]

    def __enter__(self) -> Server:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(self.line, stdout=log, stderr=subprocess.STDOUT)
        try:
            with Chairlift(self.address) as chairlift:
                chairlift.wait_ready(self._wait_seconds)
        except Exception as error:
            self.stop()
            raise AssertionError(f"not ready: {error}\n{self.log.read_text()}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        code = self.stop()
        if kind is None:
            assert code == 0, f"serve exited with {code}:\n{self.log.read_text()}"

    def stop(self) -> int:
        """One Ctrl-C; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"one Ctrl-C did not stop it:\n{self.log.read_text()}") from None

    def child(self, module: str) -> int:
        """The process id of the child that runs `python -m module`."""
        for pid, words in self._children().items():
            if module in words:
                return pid
        raise AssertionError(f"no child runs {module}:\n{self.log.read_text()}")

    def gateway(self) -> int:
        """The process id of smg, which renames itself."""
        (pid,) = [pid for pid, words in self._children().items() if "-m" not in words]
        return pid

    def _children(self) -> dict[int, list[str]]:
        """Process id → command line."""
        found: dict[int, list[str]] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                parent = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                words = entry.joinpath("cmdline").read_bytes().decode().split("\0")
            except (OSError, IndexError):
                continue  # it ended meanwhile
            if parent == self.process.pid:
                found[int(entry.name)] = words
        return found

    def kill_worker(self) -> None:
        os.kill(self.child("worker"), signal.SIGKILL)
