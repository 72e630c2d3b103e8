"""Starts the other packages as separate programs: `python -P -m scheduler_svc`, `… worker`.

The client never imports them; it only checks that their dependencies are installed, to report a
missing extra instead of an ImportError.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Final, NoReturn


class LaunchError(Exception):
    """A program cannot be started here; `str()` names the remedy."""


_MODULES: Final = {
    "scheduler": "scheduler_svc",
    "worker": "worker",
    "compare": "worker.model.compare",
}
_NEEDS: Final = {
    "scheduler": ("grpc_health", "grpc_reflection", "jinja2", "numpy", "transformers", "zmq"),
    "worker": ("numpy", "psutil", "torch", "transformers", "zmq"),
    "compare": ("psutil", "torch", "transformers"),
}
_EXTRAS: Final = {"scheduler": "scheduler", "worker": "worker", "compare": "worker"}


def command(part: str, arguments: Sequence[str]) -> list[str]:
    """The command line that runs `part`. -P keeps a folder `worker/` in the current one from being
    imported instead. Raises LaunchError if its dependencies are missing."""
    missing = [name for name in _NEEDS[part] if importlib.util.find_spec(name) is None]
    if missing:
        raise LaunchError(
            f"the {part} needs {', '.join(missing)}, not installed here: "
            f"pip install 'chairlift[{_EXTRAS[part]}]'"
        )
    return [sys.executable, "-P", "-m", _MODULES[part], *arguments]


def start(line: Sequence[str], output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Starts a child in a process group of its own, which Ctrl-C in the terminal does not reach.

    Its output goes to `output`, or where the parent's goes. On Linux the kernel sends it SIGTERM
    if the parent is killed.
    """
    return subprocess.Popen(
        line,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        process_group=0,
        preexec_fn=end_with_parent,
    )


def end_with_parent() -> None:
    """Called in a child between fork and exec: makes it end with its parent, on Linux only."""
    if _LIBC is None:
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
    _LIBC.prctl(set_parent_death_signal, signal.SIGTERM)


# loaded in advance: not between fork and exec
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None


def become(part: str, arguments: Sequence[str]) -> NoReturn:
    """Replaces this process with `part`, so that signals and systemd notifications reach it
    directly. Raises LaunchError."""
    line = command(part, arguments)
    os.execv(line[0], line)
