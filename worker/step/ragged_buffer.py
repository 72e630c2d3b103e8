"""Arrays whose lengths nobody can bound, brought to the device in one copy.

Penalties, biases, candidates and masks need as many numbers as a plan says, often none. They are
packed one behind the other into memory that grows when a step needs more, and is kept: most steps
allocate nothing, and steps without such arrays copy nothing. (Block tables are bounded and read
from graphs, at fixed addresses: see io_buffers.py.)

Owns: this memory. Does not own: when it may be written again (runner.py), what is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from worker.step.output_buffer import host_zeros

FIRST_BYTES: Final = 2**16
_ALIGNMENT: Final = 64  # bytes


class RaggedBuffer:
    """On the CPU the host's memory is the device's."""

    def __init__(self, device: torch.device) -> None:
        self._torch_device = device
        self._parts: list[tuple[int, npt.NDArray[Any]]] = []  # offset, and what lies there
        self._num_used = 0
        self._allocate(FIRST_BYTES)

    @property
    def num_bytes(self) -> int:
        """Of the host's side."""
        return len(self._host)

    def _allocate(self, num_bytes: int) -> None:
        self._host = host_zeros(num_bytes, self._torch_device)
        is_shared = self._torch_device.type == "cpu"
        # not zeroed: that would run in another lane than the copy
        self._device = (
            self._host if is_shared else torch.empty_like(self._host, device=self._torch_device)
        )

    def write(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Copies the arrays into the host's memory; the device must have read the last ones."""
        self._parts, self._num_used = [], 0
        for array in arrays:
            self._parts.append((self._num_used, array))
            self._num_used += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._num_used > self.num_bytes:
            self._allocate(max(self._num_used, 2 * self.num_bytes))
        memory = self._host.numpy()
        for offset, array in self._parts:
            place = memory[offset : offset + array.nbytes].view(array.dtype)
            place.reshape(array.shape)[...] = array

    def to_device(self) -> None:
        """Launches the copy in the lane in use; nothing where there is nothing to copy."""
        if self._device is not self._host and self._num_used:
            source = self._host[: self._num_used]
            self._device[: self._num_used].copy_(source, non_blocking=True)

    def read(self) -> list[torch.Tensor]:
        """What was written, on the device."""
        tensors = []
        for offset, array in self._parts:
            dtype = getattr(torch, np.dtype(array.dtype).name)
            place = self._device[offset : offset + array.nbytes]
            tensors.append(place.view(dtype).view(array.shape))
        return tensors
