"""Displays for concurrently streaming answers: plain text for one, tagged lines for several.

A lane is one answer: "1", or "1.2" for the second sibling of the first prompt. For terminals,
client/terminal/panels.py has live panels.
"""

from __future__ import annotations

from typing import Protocol, Self, TextIO

from client.terminal.streams import printable

_WIDTH = 88  # longer lines are broken at a space, so that text appears while a line grows


class Display(Protocol):
    """Shows lanes. Enter it before the first delta; leaving it completes the output."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def delta(self, lane: str, text: str) -> None:
        """Appends `text` to a lane."""
        ...

    def end(self, lane: str, note: str) -> None:
        """Completes a lane; `note` says how it ended."""
        ...


class PlainText:
    """A single lane, as text and nothing else: a pipe gets the answer alone."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last = "\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_line()

    def delta(self, lane: str, text: str) -> None:
        if text:
            self._out.write(printable(text, self._out))
            self._out.flush()
            self._last = text[-1]

    def end(self, lane: str, note: str) -> None:
        self._end_line()

    def _end_line(self) -> None:
        if self._last != "\n":
            self._out.write("\n")
            self._out.flush()
            self._last = "\n"


class TaggedLines:
    """Several lanes as whole lines, each prefixed with its lane."""

    def __init__(self, out: TextIO, lanes: dict[str, str]) -> None:
        """`lanes` maps each lane to its title, the prompt."""
        self._out = out
        self._titles = lanes
        self._pending: dict[str, str] = {}  # the incomplete line of each lane that has begun

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for lane in self._pending:
            self._flush(lane)

    def delta(self, lane: str, text: str) -> None:
        self._begin(lane)
        *lines, rest = (self._pending[lane] + text).split("\n")
        for line in lines:
            self._print(lane, self._wrap(lane, line))
        self._pending[lane] = self._wrap(lane, rest)

    def end(self, lane: str, note: str) -> None:
        self._begin(lane)
        self._flush(lane)
        self._print(lane, f"({note})")

    def _flush(self, lane: str) -> None:
        if self._pending[lane]:
            self._print(lane, self._pending[lane])
            self._pending[lane] = ""

    def _begin(self, lane: str) -> None:
        if lane not in self._pending:
            self._pending[lane] = ""
            self._print(lane, f"> {shortened(self._titles[lane], _WIDTH)}")

    def _wrap(self, lane: str, text: str) -> str:
        """Prints `text` in lines of _WIDTH; returns the last one, unprinted."""
        while len(text) > _WIDTH:
            space = text.rfind(" ", 1, _WIDTH + 1)
            cut = space if space > 0 else _WIDTH
            self._print(lane, text[:cut])
            text = text[cut:].removeprefix(" ")
        return text

    def _print(self, lane: str, text: str) -> None:
        self._out.write(printable(f"[{lane}] {text}".rstrip(), self._out) + "\n")
        self._out.flush()


def shortened(text: str, width: int) -> str:
    """`text` on one line of at most `width` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"
