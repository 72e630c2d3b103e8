"""The progress of a run: a line updated in place on a terminal, else one every ten seconds."""

from __future__ import annotations

import time
from typing import Self, TextIO

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_UPDATES = 0.2


class Progress:
    """Counts finished requests and output tokens, from `with` to its end."""

    def __init__(self, title: str, num_requests: int, num_tokens: int, out: TextIO) -> None:
        self._title = title
        self._totals = (num_requests, num_tokens)
        self._out = out
        self._requests = self._tokens = 0
        is_terminal = out.isatty()
        self._interval = _SECONDS_BETWEEN_UPDATES if is_terminal else _SECONDS_BETWEEN_LINES
        self._end = "\r" if is_terminal else "\n"

    def __enter__(self) -> Self:
        self._start = self._last = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self._print("\n")

    def advance(self, tokens: int, has_finished: bool) -> None:
        """Adds `tokens`, and the request that may have finished with them."""
        self._tokens += tokens
        self._requests += has_finished
        if time.monotonic() - self._last >= self._interval:
            self._print(self._end)

    def _print(self, end: str) -> None:
        self._last = time.monotonic()
        requests, tokens = self._totals
        self._out.write(
            f"{self._title}: {self._requests} of {requests} requests, {self._tokens} of {tokens} "
            f"tokens, {self._last - self._start:.0f} s{end}"
        )
        self._out.flush()
