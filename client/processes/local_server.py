"""A temporary server: `chairlift serve` as a child process on a free port.

Used by `demo` and `bench --serve`. Owns the child process.
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

from client.aio import AsyncChairlift
from client.processes import launch
from client.terminal.streams import print_error

_READY_SECONDS: Final = 600.0
_STOP_SECONDS: Final = 60.0
_MAX_LOADS: Final = 2  # a worker that died this often while loading is hopeless


class LocalServer:
    """Starts with the constructor; call `stop` at the end."""

    def __init__(self, options: Sequence[str], output: IO[bytes] | None = None) -> None:
        """`options` are the scheduler's; the child's output goes to `output`, by default where ours
        goes.

        --host and --port among the options are honoured. Raises LaunchError if another server
        already listens there, because it would be mistaken for this one.
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
        """Waits until the server is ready; False if it ends or cannot load the model. `note` is
        called with the reason for waiting whenever it changes."""
        seen: list[str] = []

        def noted(waiting_for: str) -> None:
            seen.append(waiting_for)
            note(waiting_for)

        waiting = asyncio.create_task(chairlift.wait_ready(_READY_SECONDS, noted))
        while not waiting.done():
            await asyncio.wait([waiting], timeout=0.5)
            is_hopeless = seen.count("worker: loading") > _MAX_LOADS
            if is_hopeless:
                print_error("the worker died repeatedly while loading the model")
            if is_hopeless or self._process.poll() is not None:
                waiting.cancel()
                return False
        await waiting
        return True

    def stop(self) -> int:
        """Stops the server as Ctrl-C would; returns its exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            print_error(f"the server did not stop within {_STOP_SECONDS:g} s")
            self._process.send_signal(signal.SIGINT)  # the second one kills
            return self._process.wait(_STOP_SECONDS) or 1


def _endpoint(options: Sequence[str]) -> tuple[str, str, list[str]]:
    """(host, port, other options); by default loopback and a free port."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="0")
    known, others = parser.parse_known_args(options)
    port = str(_free_port()) if known.port == "0" else known.port
    return known.host, port, others


def _reachable(host: str) -> str:
    """The host under which a client reaches a server that listens on `host`."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1" if host == "0.0.0.0" else "[::1]"
    return f"[{host}]" if ":" in host else host


def _refuse_if_taken(host: str, port: str) -> None:
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except (OSError, ValueError, OverflowError):  # the server reports an invalid port
        return
    raise launch.LaunchError(
        f"another server already listens on {host}, port {port}; choose another --port or omit it"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
