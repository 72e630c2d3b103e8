"""How answers look that stream at the same time, on anything that takes lines of text.

A lane is one answer: "1", or "1.2" for the third sibling of the first prompt. The terminal's live
panels are in client/panels.py.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self, TextIO

from client.terminal import for_reader

_WIDTH = 88  # a line longer than this is broken at a space, so that a long one does not look stuck


class Display(Protocol):
    """Shows lanes. Entered before the first delta; leaving completes what is shown."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def delta(self, lane: str, text: str) -> None:
        """A lane has grown."""
        ...

    def end(self, lane: str, note: str) -> None:
        """A lane is complete; `note` says how it ended."""
        ...


class Raw:
    """One lane: text and nothing else."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last = "\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._last != "\n":
            self._out.write("\n")

    def delta(self, lane: str, text: str) -> None:
        if text:
            self._out.write(for_reader(text, self._out))
            self._out.flush()
            self._last = text[-1]

    def end(self, lane: str, note: str) -> None:
        """No note: what reads a pipe wants the text alone. What follows begins a line."""
        if self._last != "\n":
            self._out.write("\n")
            self._out.flush()
            self._last = "\n"


class TaggedLines:
    """Several lanes: whole lines, each with its lane in front."""

    def __init__(self, out: TextIO, lanes: dict[str, str]) -> None:
        """`lanes` maps each lane to its title, the prompt."""
        self._out = out
        self._titles = lanes
        self._pending: dict[str, str] = {}  # of each lane that has begun, its incomplete line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for lane in self._pending:
            self._flush(lane)

    def delta(self, lane: str, text: str) -> None:
        self._begin(lane)
        *lines, rest = (self._pending[lane] + text).split("\n")
        for line in lines:
            self._line(lane, self._broken(lane, line))
        self._pending[lane] = self._broken(lane, rest)

    def end(self, lane: str, note: str) -> None:
        self._begin(lane)
        self._flush(lane)
        self._line(lane, f"({note})")

    def _flush(self, lane: str) -> None:
        if self._pending[lane]:
            self._line(lane, self._pending[lane])
            self._pending[lane] = ""

    def _begin(self, lane: str) -> None:
        if lane not in self._pending:
            self._pending[lane] = ""
            self._line(lane, f"> {shortened(self._titles[lane], _WIDTH)}")

    def _broken(self, lane: str, text: str) -> str:
        """Prints all of `text` but the last line's worth, which it returns."""
        while len(text) > _WIDTH:
            space = text.rfind(" ", 1, _WIDTH + 1)
            cut = space if space > 0 else _WIDTH
            self._line(lane, text[:cut])
            text = text[cut:].removeprefix(" ")
        return text

    def _line(self, lane: str, text: str) -> None:
        self._out.write(for_reader(f"[{lane}] {text}".rstrip(), self._out) + "\n")
        self._out.flush()


def shortened(text: str, width: int) -> str:
    """`text` on one line of at most `width` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"
