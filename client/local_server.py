"""A server of one's own for a while: `chairlift serve` as a child on a free port.

`demo` and `bench --serve` use it. Owns the child's life; what it prints goes where the caller says.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import IO, Final

from client import launch
from client.aio import AsyncChairlift

_READY_SECONDS: Final = 600.0
_STOP_SECONDS: Final = 60.0
_LOADS: Final = 2  # a worker that has died so often while loading will not get further


class LocalServer:
    """Started when made; `stop` must be called."""

    def __init__(self, options: Sequence[str], output: IO[bytes] | None = None) -> None:
        """`options` are the scheduler's; `output` takes what is printed, None: this terminal."""
        self.port = _free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] = launch.start(
            [
                *(sys.executable, "-P", "-m", "client", "serve"),
                *("--host", "127.0.0.1", "--port", str(self.port)),
                *options,
            ],
            output,
        )

    async def is_ready(self, chairlift: AsyncChairlift, note: Callable[[str], None]) -> bool:
        """Waits until it is; False if it ends, or fails to load, before that. `note` is told what
        is being waited for, whenever that changes."""
        seen: list[str] = []

        def noted(waiting_for: str) -> None:
            seen.append(waiting_for)
            note(waiting_for)

        waiting = asyncio.create_task(chairlift.wait_ready(_READY_SECONDS, noted))
        while not waiting.done():
            await asyncio.wait([waiting], timeout=0.5)
            is_hopeless = seen.count("worker: loading") > _LOADS
            if is_hopeless:
                print("chairlift: the worker dies while loading", file=sys.stderr)
            if is_hopeless or self._process.poll() is not None:
                waiting.cancel()
                return False
        await waiting
        return True

    def stop(self) -> int:
        """As Ctrl-C would; the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"chairlift: the server did not stop within {_STOP_SECONDS:g} s", file=sys.stderr)
            self._process.send_signal(signal.SIGINT)  # the second one kills
            return self._process.wait(_STOP_SECONDS) or 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
