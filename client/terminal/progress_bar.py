"""How far many requests have come: a bar on a terminal with rich, else a line now and then."""

from __future__ import annotations

import importlib.util
import time
from typing import Any, Protocol, Self, TextIO

_SECONDS_BETWEEN_LINES = 10.0


class ProgressBar(Protocol):
    """Counts finished requests and their tokens, from `with` to its end."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def advance(self, tokens: int) -> None:
        """One more request has finished, with so many output tokens."""
        ...


def progress_bar(total: int, out: TextIO) -> ProgressBar:
    """The display that suits `out`."""
    if out.isatty() and importlib.util.find_spec("rich") is not None:
        return _Bar(total, out)
    return _Lines(total, out)


class _Bar:
    def __init__(self, total: int, out: TextIO) -> None:
        from rich import progress
        from rich.console import Console

        self._bar: Any = progress.Progress(
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[tokens]} tokens"),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left:"),
            progress.TimeRemainingColumn(),
            console=Console(file=out),
        )
        self._task = self._bar.add_task("", total=total, tokens=0)
        self._tokens = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, tokens: int) -> None:
        self._tokens += tokens
        self._bar.update(self._task, advance=1, tokens=self._tokens)


class _Lines:
    def __init__(self, total: int, out: TextIO) -> None:
        self._total = total
        self._out = out
        self._finished = self._tokens = 0

    def __enter__(self) -> Self:
        self._start = self._last = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def advance(self, tokens: int) -> None:
        self._finished += 1
        self._tokens += tokens
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            print(
                f"{self._finished} of {self._total} requests, {self._tokens} tokens, "
                f"{now - self._start:.0f} s",
                file=self._out,
                flush=True,
            )
