"""The device that these tests measure, and how they keep time on it.

That is the first CUDA device. CHAIRLIFT_GPU_TESTS_DEVICE=cpu runs the same script in tiny sizes
where there is none, so that it is known to run before anybody has the time of a GPU to spend; its
figures mean nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final, TypeVar

import torch

from worker.memory.pool_size import free_memory
from worker.step.lanes import settle

DEVICE: Final = torch.device(os.environ.get("CHAIRLIFT_GPU_TESTS_DEVICE", "cuda:0"))
IS_CUDA: Final = DEVICE.type == "cuda"
DTYPE: Final = torch.bfloat16 if IS_CUDA else torch.float32
_SHARE: Final = 0.7  # of the memory that is free may be asked for
_COPIED: Final = 2**30  # bytes: far more than any cache holds

Size = TypeVar("Size")


def sized(full: Size, tiny: Size) -> Size:
    """The size to measure on a GPU, or a small one that runs in a moment on a CPU."""
    return full if IS_CUDA else tiny


def has_room(num_bytes: int) -> bool:
    """Whether so much may be allocated; sizes that find no room are left out of the tables."""
    return num_bytes < _SHARE * free_memory(DEVICE)


def seconds_of(function: Callable[[], object], repeats: int = 3) -> float:
    """Seconds of one call, work on the device and launches by the host included; the best of
    `repeats` after a warm-up. seconds_on_device leaves launches out."""
    function()
    settle(DEVICE)
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        settle(DEVICE)
        best = min(best, time.perf_counter() - begin)
    return best


def seconds_on_device(function: Callable[[], object]) -> float:
    """Seconds of one call replayed from a graph, which excludes the host's launches."""
    if not IS_CUDA:
        return seconds_of(function, 1)
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        for _ in range(2):  # compile
            function()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            function()
        graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        repeats = 5
        begin.record(stream)
        for _ in range(repeats):
            graph.replay()
        end.record(stream)
        end.synchronize()
    return begin.elapsed_time(end) / 1000 / repeats


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy within the device."""
    source = torch.zeros(sized(_COPIED, 2**24), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_on_device(lambda: target.copy_(source))
