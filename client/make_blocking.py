"""Derives the blocking client from the asyncio one: `python client/make_blocking.py`.

Text substitution is enough because client/aio.py keeps to a narrow style: what differs in more
than keywords and names is in client/calls.py, in both forms. The package unasync would leave
the docstrings asynchronous, and brings setuptools along.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ASYNC_SOURCE: Final = Path(__file__).with_name("aio.py")
BLOCKING: Final = Path(__file__).with_name("blocking.py")

_SUBSTITUTIONS: Final = (
    ("The client for asyncio", "The client for blocking code"),
    (
        "Create the client inside a running event loop;\n"
        "cancelling the task that reads a stream cancels its request.",
        "Threads may share a client;\na stream belongs to one thread.",
    ),
    (
        "# The source of both clients: client/make_blocking.py derives client/blocking.py from "
        "this file.",
        "# Generated from client/aio.py by `make protos`: edit that file.",
    ),
    ("from asyncio import sleep", "from time import sleep"),
    (r"\b(?:async|await) ", ""),
    (r"\bopen_async_channel\b", "open_channel"),
    (r"\b__a(enter|exit|next)__", r"__\1__"),
    (r"\b(Stop)?Async(\w+)", r"\1\2"),
)


def blocking_source() -> str:
    """The source text of client/blocking.py."""
    text = ASYNC_SOURCE.read_text(encoding="utf-8")
    for pattern, replacement in _SUBSTITUTIONS:
        text, count = re.subn(pattern, replacement, text)
        assert count, f"{ASYNC_SOURCE} has no {pattern!r} any more"
    return text


if __name__ == "__main__":
    BLOCKING.write_text(blocking_source(), encoding="utf-8")
