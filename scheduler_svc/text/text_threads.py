"""Threads for tokenising, so that long texts delay no short ones and do not pile up in memory.

Long texts run one at a time, short ones beside them. A call whose client disconnects before its
turn is not made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LONG_BYTES: Final = 1 << 16
NUM_SHORT: Final = 2  # threads


class TextThreads:
    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(NUM_SHORT, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-text")

    async def run(
        self, num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs `function` in a thread; `num_bytes` is the size of its text."""
        threads = self._short if num_bytes <= LONG_BYTES else self._long
        call = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(threads, call)
