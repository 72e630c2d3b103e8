"""File descriptors: as many as the system gives, and some that clients cannot use up.

A client needs no request to hold a descriptor: an open connection is enough. Where connections
took the last one, a worker that comes back could not be let in (libzmq even aborts the process),
and no file could be opened. So connections are bounded, by what is left when the server is made.
"""

from __future__ import annotations

import contextlib
import os
import resource
from typing import Final

# for the link (a connection each for workers that serve, load and stand by), files that are read
# while a model is loaded, and connections above the bound, which are open until they are refused
RESERVED: Final = 48
MOST: Final = 1 << 20  # connections, where descriptors are not limited


def raise_limit() -> None:
    """Lifts the soft limit of this process to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections() -> int:
    """Connections of clients that may be open at the same time; at least 1."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST
    return max(1, min(MOST, soft - _num_open() - RESERVED))


def _num_open() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # not Linux
        return 0
