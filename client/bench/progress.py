"""How far a run is: a bar on a terminal that has rich, a line now and then anywhere else."""

from __future__ import annotations

import importlib.util
import sys
import time
from types import TracebackType
from typing import Any, Self, TextIO

_SECONDS_BETWEEN_LINES = 10.0


class Lines:
    """A line every ten seconds, and one at the end."""

    def __init__(self, title: str, num_requests: int, num_tokens: int, out: TextIO) -> None:
        self._title = title
        self._totals = (num_requests, num_tokens)
        self._out = out
        self._requests = self._tokens = 0

    def __enter__(self) -> Self:
        self._start = self._last = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._print()

    def advance(self, tokens: int, has_ended: bool) -> None:
        """So many tokens came; a request may have ended with them."""
        self._tokens += tokens
        self._requests += has_ended
        if time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._print()

    def _print(self) -> None:
        self._last = time.monotonic()
        requests, tokens = self._totals
        self._out.write(
            f"{self._title}: {self._requests} of {requests} requests, {self._tokens} of {tokens} "
            f"tokens, {self._last - self._start:.0f} s\n"
        )
        self._out.flush()


class Bar:
    """rich's progress bar, over the output tokens."""

    def __init__(self, title: str, num_requests: int, num_tokens: int, out: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._num_requests = num_requests
        self._requests = 0
        self._progress: Any = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} tokens, {task.fields[requests]} requests"),
            TimeElapsedColumn(),
            console=Console(file=out),
        )
        self._task = self._progress.add_task(title, total=num_tokens, requests=self._ended())

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def advance(self, tokens: int, has_ended: bool) -> None:
        """So many tokens came; a request may have ended with them."""
        self._requests += has_ended
        self._progress.update(self._task, advance=tokens, requests=self._ended())

    def _ended(self) -> str:
        return f"{self._requests}/{self._num_requests}"


def choose_progress(title: str, num_requests: int, num_tokens: int) -> Bar | Lines:
    """What fits standard error, which leaves standard output to the report."""
    has_rich = importlib.util.find_spec("rich") is not None
    kind = Bar if has_rich and sys.stderr.isatty() else Lines
    return kind(title, num_requests, num_tokens, sys.stderr)
