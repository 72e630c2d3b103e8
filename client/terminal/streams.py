"""The standard streams: undecodable input is reported, control characters never reach a terminal.

A model may write escape sequences: they could retitle a window, clear the screen or fill the
clipboard. Bidirectional controls could show a text in another order than it is read. A terminal
gets both escaped, character by character, so that nothing comes together from several deltas; a
pipe gets the text unchanged.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Final, TextIO

# escaped as in JSON: C0, DEL and C1 without tab and newline; embeddings, overrides and isolates
_CONTROLS: Final = (
    *range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)
)  # fmt: skip
_ESCAPES: Final = {code: f"\\u{code:04x}" for code in _CONTROLS if chr(code) not in "\t\n"}


def prepare() -> None:
    """Configures the standard streams so that no single character raises an error.

    Undecodable input becomes surrogates, for `why_not_text`; unencodable output is escaped. A
    stream that the caller has closed, as cron may, becomes an empty one.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # open until we exit
    for stream, errors in (
        (sys.stdin, "surrogateescape"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def why_not_text(text: str) -> str | None:
    """Names the first undecodable byte of `text`; None if there is none."""
    for place, character in enumerate(text):
        if "\ud800" <= character <= "\udfff":
            encoding = getattr(sys.stdin, "encoding", None) or "utf-8"
            byte = ord(character) - 0xDC00
            what = f"byte 0x{byte:02x}" if 0x80 <= byte <= 0xFF else "half a surrogate pair"
            return f"{what} after {place} characters is not {encoding.upper()} text"
    return None


def escape_controls(text: str) -> str:
    """`text` with every control character but tab and newline escaped."""
    return text.translate(_ESCAPES)


def printable(text: str, out: TextIO) -> str:
    """`text` as it may be written to `out`: with control characters escaped on a terminal."""
    return escape_controls(text) if out.isatty() else text


def discard_output() -> None:
    """Drops buffered standard output, so that the interpreter's exit does not fail to write it."""
    with contextlib.suppress(OSError, ValueError):  # it has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_error(message: object) -> None:
    """Prints one line to standard error, as `printable`: servers quote what clients sent."""
    print(f"chairlift: {printable(str(message), sys.stderr)}", file=sys.stderr, flush=True)
