"""Freed memory goes back to the system.

glibc keeps what a thread has freed for that thread's next allocation: after some long texts that is
hundreds of MB which nobody will ask for again.
"""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any, Final

LARGE_BYTES: Final = 1 << 16  # of a message: tokenising takes up to 200 times as much
DELAY_SECONDS: Final = 1.0  # so that many messages at once cost one turn, after they are gone


class Trimmer:
    """Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc needs it
        self._is_due = False

    def note(self, num_bytes: int) -> None:
        """That a message of this size has been dealt with."""
        if self._trim is None or self._is_due or num_bytes < LARGE_BYTES:
            return
        self._is_due = True
        asyncio.get_running_loop().call_later(DELAY_SECONDS, self._begin)

    def _begin(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, self._trim, 0)
