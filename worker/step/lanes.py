"""Lanes of work that run beside each other on a device, and marks in them.

On CUDA a lane is a stream and a mark an event; elsewhere work is done when its call returns, so
lanes and marks only keep the time. The runner (runner.py) is written once, for both.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in a lane."""

    def wait(self) -> None:
        """Block this thread until the lane has come here; other Python threads go on."""
        ...

    def microseconds_since(self, earlier: Mark) -> int:
        """Both must have been passed."""
        ...


class Lane(Protocol):
    """Does what it is given in order."""

    def use(self) -> AbstractContextManager[object]:
        """Work that is begun within goes into this lane."""
        ...

    def mark(self) -> Mark: ...

    def after(self, mark: Mark) -> None:
        """What comes from now on waits for `mark` of another lane; the host does not."""
        ...


def settle(device: torch.device) -> None:
    """Waits for all that was begun on the device so far, outside of lanes too; from now on it is
    this thread's device. CUDA's lanes wait for nothing of themselves: not for the default stream,
    in which weights are loaded and pools zeroed."""
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
        # blocking: the waiting thread sleeps instead of spinning, and the GIL is free meanwhile
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
