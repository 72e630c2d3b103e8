"""Lanes: queues of work that run concurrently on a device, and marks in them.

On CUDA a lane is a stream and a mark an event; elsewhere work has finished when its call returns,
and marks only record the time. So the runner (runner.py) is written once, for both.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in a lane."""

    def wait(self) -> None:
        """Blocks this thread until the lane has reached the mark; other Python threads run on."""
        ...

    def microseconds_since(self, earlier: Mark) -> int:
        """Microseconds between two marks that have both been reached."""
        ...


class Lane(Protocol):
    """Runs its work in order."""

    def use(self) -> AbstractContextManager[object]:
        """Work that is launched inside goes into this lane."""
        ...

    def mark(self) -> Mark: ...

    def after(self, mark: Mark) -> None:
        """Work launched from now on waits for `mark` of another lane; the host does not."""
        ...


def settle(device: torch.device) -> None:
    """Waits for all work launched on the device so far, also outside of lanes, and makes it this
    thread's device. Lanes do not wait for CUDA's default stream by themselves, in which weights are
    loaded and pools are zeroed."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)


def new_lane(device: torch.device) -> Lane:
    return _CudaLane(device) if device.type == "cuda" else _HostLane()


class _HostMark:
    def __init__(self) -> None:
        self._at = time.perf_counter_ns()

    def wait(self) -> None:
        pass

    def microseconds_since(self, earlier: Mark) -> int:
        assert isinstance(earlier, _HostMark)
        return (self._at - earlier._at) // 1000


class _HostLane:
    def use(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> Mark:
        return _HostMark()

    def after(self, mark: Mark) -> None:
        pass


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # blocking: a waiting thread sleeps instead of spinning, without the interpreter's lock
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def microseconds_since(self, earlier: Mark) -> int:
        assert isinstance(earlier, _CudaMark)
        return int(1000 * earlier._event.elapsed_time(self._event))


class _CudaLane:
    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def use(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def mark(self) -> Mark:
        return _CudaMark(self.stream)

    def after(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        self.stream.wait_event(mark._event)
