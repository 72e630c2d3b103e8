"""What passes between a terminal and the client: odd bytes in, control characters out.

A model may write escape sequences: they could retitle a window, clear the screen or fill the
clipboard of whoever reads the answer. On a terminal they are spelled out; a pipe gets the text as
it is. Bytes that are not text in the locale's encoding are named in a sentence, not a traceback.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Final, TextIO

# C0, DEL and C1 but tab and newline, each as JSON would escape it
_SPELLED: Final = {
    code: f"\\u{code:04x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
}


def prepare() -> None:
    """Makes the standard streams raise no error over a single character: what cannot be decoded
    is kept for `why_not_text`, what cannot be encoded is shown as an escape. A stream that the
    caller has closed, as cron may, becomes an empty one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # open as long as we live
    for stream, errors in (
        (sys.stdin, "surrogateescape"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def why_not_text(text: str) -> str | None:
    """The reason in words, if `text` holds bytes that could not be decoded; else None."""
    for place, character in enumerate(text):
        if "\ud800" <= character <= "\udfff":
            encoding = getattr(sys.stdin, "encoding", None) or "utf-8"
            byte = ord(character) - 0xDC00
            what = f"byte 0x{byte:02x}" if 0x80 <= byte <= 0xFF else "half a surrogate pair"
            return f"{what} after {place} characters is not {encoding.upper()} text"
    return None


def harmless(text: str) -> str:
    """`text` with its control characters, tab and newline excepted, spelled out."""
    return text.translate(_SPELLED)


def for_reader(text: str, out: TextIO) -> str:
    """`text` as it may be written to `out`: harmless if that is a terminal."""
    return harmless(text) if out.isatty() else text


def give_up_output() -> None:
    """What standard output still holds goes nowhere, so that the exit does not try to write it."""
    with contextlib.suppress(OSError, ValueError):  # it has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(message: object) -> None:
    """One line on standard error; servers quote what clients sent, so it is made harmless."""
    print(f"chairlift: {for_reader(str(message), sys.stderr)}", file=sys.stderr, flush=True)
