"""A step's outputs at one place, which one copy brings to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


class OutputBuffer:
    """What a step computed, in parts of 4-byte items one behind the other.

    On the CPU the host's buffer is the device's.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """`size` is the number of items at first."""
        self._torch_device = device
        self._lengths: list[int] = []
        self._allocate(size)

    def _allocate(self, size: int) -> None:
        self._host = host_zeros(4 * size, self._torch_device).view(torch.int32)
        is_shared = self._torch_device.type == "cpu"
        self._device = (
            self._host if is_shared else torch.empty_like(self._host, device=self._torch_device)
        )

    def begin(self, size: int) -> None:
        """Before a step of at most `size` items is launched; grows if it must."""
        self._lengths = []
        if size > len(self._host):
            self._allocate(max(size, 2 * len(self._host)))

    def write(self, parts: Sequence[torch.Tensor]) -> None:
        """Stores a step's results on the device; integers and booleans as int32, floating-point
        numbers as float32."""
        self._lengths = [len(part) for part in parts]
        places = self._device[: sum(self._lengths)].split(self._lengths)
        for part, place in zip(parts, places, strict=True):
            (place.view(torch.float32) if part.is_floating_point() else place).copy_(part)

    def to_host(self) -> None:
        if self._device is not self._host:
            count = sum(self._lengths)
            self._host[:count].copy_(self._device[:count], non_blocking=self._host.is_pinned())

    def read(self) -> list[npt.NDArray[np.int32]]:
        """Copies of the parts, from the host's side; those of a step that wrote none are none."""
        array = self._host[: sum(self._lengths)].numpy().copy()
        return np.split(array, np.cumsum(self._lengths)[:-1]) if self._lengths else []


def host_zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Bytes in the host's memory, pinned if CUDA copies them. uint8 [num_bytes]"""
    if device.type == "cuda":
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(np.zeros(num_bytes, np.uint8))  # the system zeroes a page on first use
