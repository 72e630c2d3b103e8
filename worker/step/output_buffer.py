"""A step's outputs at fixed addresses, which one copy brings to the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


class OutputBuffer:
    """Sampled tokens [S], whether each token's hidden state is finite [T], and each logits row [L].

    On the CPU the host's buffer is the device's.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """`size` is the most that S + T + L may be."""
        self._host = host_zeros(4 * size, device).view(torch.int32)
        is_shared = device.type == "cpu"
        self._device = self._host if is_shared else torch.zeros_like(self._host, device=device)
        self._lengths = [0, 0, 0]

    def clear(self) -> None:
        self._lengths = [0, 0, 0]

    def write(self, tokens: torch.Tensor, finite: torch.Tensor, logits: torch.Tensor) -> None:
        """Stores a step's results on the device, one behind the other."""
        parts = (tokens, finite, logits)
        self._lengths = [len(part) for part in parts]
        places = self._device[: sum(self._lengths)].split(self._lengths)
        for part, place in zip(parts, places, strict=True):
            place.copy_(part)

    def to_host(self) -> None:
        if self._device is not self._host:
            count = sum(self._lengths)
            self._host[:count].copy_(self._device[:count], non_blocking=self._host.is_pinned())

    def read(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Copies of the three, from the host's side."""
        array = self._host[: sum(self._lengths)].numpy().copy()
        tokens, finite, logits = np.split(array, np.cumsum(self._lengths)[:-1])
        return tokens, finite.astype(np.bool_), logits.astype(np.bool_)


def host_zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Bytes in the host's memory, pinned if CUDA copies them. uint8 [num_bytes]"""
    if device.type == "cuda":
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(np.zeros(num_bytes, np.uint8))  # the system zeroes a page on first use
