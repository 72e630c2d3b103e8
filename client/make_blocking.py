"""Derives the blocking client from the asyncio one: `python client/make_blocking.py`.

Text substitution is enough because the sources keep to a narrow style: what differs in more than
keywords and names is in client/calls.py and client/mapping.py, in both forms. The package unasync
would leave the docstrings asynchronous, and brings setuptools along.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
DERIVED: Final = {
    HERE / "aio.py": HERE / "blocking.py",
    HERE / "aio_stream.py": HERE / "blocking_stream.py",
}

_SUBSTITUTIONS: Final = (
    ("The client for asyncio", "The client for blocking code"),
    (", for asyncio", ", for blocking code"),
    (
        "Create the client inside a running event loop;\n"
        "cancelling the task that reads a stream cancels its request.",
        "Threads may share a client;\na stream belongs to one thread.",
    ),
    (
        r"# client/make_blocking.py derives client/blocking(_stream)?.py from this file.",
        r"# Generated from client/aio\1.py by `make protos`: edit that file.",
    ),
    ("from asyncio import sleep", "from time import sleep"),
    (r"\b(?:async|await) ", ""),
    (r"\bopen_async_channel\b", "open_channel"),
    (r"\basync_ordered_answers\b", "ordered_answers"),
    (r"\bclient\.aio_stream\b", "client.blocking_stream"),
    (r"\b__a(enter|exit|next)__", r"__\1__"),
    (r"\b(Stop)?Async(\w+)", r"\1\2"),
)


def blocking_source(source: Path) -> str:
    """The text of the blocking twin of `source`."""
    text = source.read_text(encoding="utf-8")
    for pattern, replacement in _SUBSTITUTIONS:
        text = re.sub(pattern, replacement, text)
    return text


def unused_substitutions() -> list[str]:
    """Patterns that no source has any more."""
    texts = "".join(source.read_text(encoding="utf-8") for source in DERIVED)
    return [pattern for pattern, _ in _SUBSTITUTIONS if not re.search(pattern, texts)]


if __name__ == "__main__":
    for source, blocking in DERIVED.items():
        blocking.write_text(blocking_source(source), encoding="utf-8")
