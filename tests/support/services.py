"""Scheduler and worker as two services, of which the scheduler can be restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.processes import STOP_SECONDS, free_port

ROOT = Path(__file__).resolve().parents[2]


class Services:
    """A scheduler that can be restarted, and a worker that stays; both as deploy/ starts them."""

    def __init__(self, folder: Path, model: Path, *options: str) -> None:
        """`options` are the scheduler's."""
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.log = folder / "both.log"
        self._socket = f"ipc://{folder}/worker"
        self._options = ("--model", str(model), "--num-blocks", "50", *options)
        self._output = self.log.open("wb")
        self._worker = self._start("worker", "--connect", self._socket)
        self._scheduler = self._start_scheduler()

    def _start(self, *line: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", *line],
            stdout=self._output,
            stderr=self._output,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def _start_scheduler(self) -> subprocess.Popen[bytes]:
        return self._start(
            "scheduler_svc",
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--worker-address", self._socket, *self._options),
        )

    def restart_scheduler(self, how: signal.Signals) -> None:
        self._scheduler.send_signal(how)
        assert self._scheduler.wait(STOP_SECONDS) in (0, -signal.SIGKILL)
        self._scheduler = self._start_scheduler()

    def stop(self) -> None:
        assert self._worker.poll() is None, f"the worker ended:\n{self.log.read_text()}"
        for process in (self._scheduler, self._worker):
            process.terminate()
        for process in (self._scheduler, self._worker):
            assert process.wait(STOP_SECONDS) == 0, self.log.read_text()
        self._output.close()
