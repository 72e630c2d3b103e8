"""Starts the other packages as programs of their own: `python -P -m scheduler_svc`, `… worker`.

The client never imports them; it only looks whether what they need is installed, to say so before
they fail with an ImportError.
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
    """A program that cannot be started here; `str()` says how to change that."""


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
    """The command line of a part. -P: a folder `worker/` in the current one must not be taken."""
    missing = [name for name in _NEEDS[part] if importlib.util.find_spec(name) is None]
    if missing:
        raise LaunchError(
            f"the {part} needs {', '.join(missing)}, which is not installed here: "
            f"pip install 'chairlift[{_EXTRAS[part]}]'"
        )
    return [sys.executable, "-P", "-m", _MODULES[part], *arguments]


def start(line: Sequence[str], output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """A child that a Ctrl-C in the terminal does not reach: its parent decides what that means.

    What it prints goes to `output`; None: where the parent's goes. On Linux the kernel sends it
    SIGTERM should the parent be killed.
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
    """For a child, between fork and exec: it ends with its parent, where the system can do that."""
    if _LIBC is None:
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
    _LIBC.prctl(set_parent_death_signal, signal.SIGTERM)


# loaded here, not between fork and exec
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None


def become(part: str, arguments: Sequence[str]) -> NoReturn:
    """Replaces this process, so that signals and systemd's notifications need no detour."""
    line = command(part, arguments)
    os.execv(line[0], line)
