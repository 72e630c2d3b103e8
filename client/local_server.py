"""A server of one's own for a while: `chairlift serve` as a child on a free port.

`demo` and `bench --serve` use it. Owns the child's life; what it prints goes where the caller says.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import IO, Final

from client import launch
from client.aio import AsyncChairlift
from client.terminal import complain

_READY_SECONDS: Final = 600.0
_STOP_SECONDS: Final = 60.0
_LOADS: Final = 2  # a worker that has died so often while loading will not get further


class LocalServer:
    """Started when made; `stop` must be called."""

    def __init__(self, options: Sequence[str], output: IO[bytes] | None = None) -> None:
        """`options` are the scheduler's; `output` takes what is printed, None: this terminal.

        A --host or --port among them is where the server listens and is waited for. Raises
        LaunchError where another server listens there: it would be taken for this one.
        """
        host, port, others = _endpoint(options)
        self.address = f"{_reachable(host)}:{port}"
        _refuse_if_taken(_reachable(host).strip("[]"), port)
        self._process: subprocess.Popen[bytes] = launch.start(
            [
                *(sys.executable, "-P", "-m", "client", "serve"),
                *("--host", host, "--port", port),
                *others,
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
                complain("the worker dies while loading")
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
            complain(f"the server did not stop within {_STOP_SECONDS:g} s")
            self._process.send_signal(signal.SIGINT)  # the second one kills
            return self._process.wait(_STOP_SECONDS) or 1


def _endpoint(options: Sequence[str]) -> tuple[str, str, list[str]]:
    """(host, port, other options); what is not given, or port 0, is chosen here."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="0")
    known, others = parser.parse_known_args(options)
    port = str(_free_port()) if known.port == "0" else known.port
    return known.host, port, others


def _reachable(host: str) -> str:
    """Where a client finds a server that listens on `host`."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1" if host == "0.0.0.0" else "[::1]"
    return f"[{host}]" if ":" in host else host


def _refuse_if_taken(host: str, port: str) -> None:
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except (OSError, ValueError, OverflowError):  # what is no port the server itself names
        return
    raise launch.LaunchError(
        f"a server already listens on {host}, port {port}; choose another --port, or give none"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
