"""Reserves an ipc address for one process: binding alone would take it from its owner.

libzmq removes whatever is at the path before it binds, even a live socket. So the process holds a
lock on a file beside the socket for as long as it lives; the system releases it however the process
ends, so a socket file left behind blocks nobody.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from pathlib import Path


class AddressInUse(OSError):
    """Another process listens at the address."""


class IpcLock:
    """Held from `IpcLock(path)` to `release`."""

    def __init__(self, path: str) -> None:
        """Raises AddressInUse, or OSError where the lock file cannot be written."""
        self._file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.read(self._file, 20).decode(errors="replace").strip()
                raise AddressInUse(f"another scheduler listens there (pid {owner})") from None
            _check_nobody_listens(path)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            os.close(self._file)
            raise

    def release(self) -> None:
        os.close(self._file)


def _check_nobody_listens(path: str) -> None:
    """A program that takes no lock must not lose its socket, or its file, either."""
    try:
        mode = Path(path).lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AddressInUse("the path exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return  # left behind
        except TimeoutError:
            pass  # its backlog is full
    raise AddressInUse("another program listens there")
