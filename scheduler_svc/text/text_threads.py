"""Threads of their own for tokenising, so that long texts hold up neither others nor memory.

Long texts go one after the other, short ones beside them. A call that its client gave up before
its turn came is not made.
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
        """`function` in a thread; `num_bytes` says how much it has to read."""
        threads = self._short if num_bytes <= LONG_BYTES else self._long
        call = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(threads, call)
