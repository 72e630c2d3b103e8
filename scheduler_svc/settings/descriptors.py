"""File descriptors: raises their limit, and reserves some that clients cannot use up.

A client needs no request to occupy a descriptor: an open connection is enough. If connections used
up the last one, a returning worker could not connect (libzmq even aborts the process), and no file
could be opened. So connections are limited to what is left when the server is created.
"""

from __future__ import annotations

import contextlib
import os
import resource
from typing import Final

# for the worker link (one connection for each worker that serves, loads or stands by), files read
# while a model is loaded, and connections over the limit, which are open until they are refused
RESERVED: Final = 48
MAX_CONNECTIONS: Final = 1 << 20  # where descriptors are unlimited


def raise_limit() -> None:
    """Raises the soft limit of this process to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS allows less than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections() -> int:
    """Client connections that may be open at the same time; at least 1."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, soft - _num_open() - RESERVED))


def _num_open() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # not Linux
        return 0
