"""The largest numbers of rows, in one order everywhere: falling, the lower id first among equals.

torch.topk leaves the order of equals open, so two devices, or two batches, could differ.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

_KEY_BITS: Final = 2**32


def largest(values: Tensor, size: int) -> Tensor:
    """Ids of the `size` largest of each row of `values` (float32 [R, V], size ≤ V). A row that
    holds NaN gets some valid ids. Nothing here waits for a CUDA device.

    int64 [R, size]
    """
    num_rows, width = values.shape
    if size == 0 or num_rows == 0:
        return torch.zeros(num_rows, size, dtype=torch.int64, device=values.device)
    if values.device.type == "cpu" and size < width:
        return _largest_on_host(values, size)
    if values.device.type == "cuda" and size < width:
        return (
            ordered_keys(values)
            .topk(size, dim=-1)
            .values.remainder_(_KEY_BITS)
            .neg_()
            .add_(width - 1)
        )
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :size]


def _largest_on_host(values: Tensor, size: int) -> Tensor:
    # numpy finds the size-th largest five times faster than torch.topk finds the ids
    array = values.numpy()
    ids = np.empty((len(array), size), np.int64)
    for index, row in enumerate(array):
        bound = np.partition(row, -size)[-size]
        found = np.flatnonzero(row >= bound)  # more than size if several equal the bound
        if len(found) < size:  # NaN
            found = np.arange(size)
        ids[index] = found[np.argsort(-row[found], kind="stable")[:size]]
    return torch.from_numpy(ids)


def ordered_keys(values: Tensor) -> Tensor:
    """int64 [R, V], all different within a row, in the order that `largest` promises."""
    width = values.shape[1]
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # as the numbers rise
    return rising * _KEY_BITS + torch.arange(width - 1, -1, -1, device=values.device)
