"""The largest numbers of rows, in one order everywhere: falling, the lower id first among equals.

torch.topk leaves the order of equals open, so two devices, or two batches, could differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

_KEY_BITS: Final = 2**32
_WITHOUT_KEYS: Final = ("cpu", "mps")  # kinds of devices that sort whole rows


def largest(values: Tensor, size: int, rows: Tensor | None = None) -> Tensor:
    """Ids of the `size` largest of each row of `values` (float32 [., V], size ≤ V), or of each of
    `rows` (int64). A row that holds NaN gets some valid ids. Nothing here waits for a CUDA device.

    int64 [R, size]
    """
    width, device = values.shape[1], values.device
    if device.type == "cpu" and size < width:
        return _largest_on_host(values, size, range(len(values)) if rows is None else rows.tolist())
    if rows is not None:
        values = values[rows]
    if device.type not in _WITHOUT_KEYS and size < width:
        keys = ordered_keys(values).topk(size, dim=-1).values
        return (width - 1) - keys.remainder(_KEY_BITS)
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :size]


def _largest_on_host(values: Tensor, size: int, rows: Sequence[int]) -> Tensor:
    # numpy finds the size-th largest five times faster than torch.topk finds the ids
    array = values.numpy()
    ids = np.empty((len(rows), size), np.int64)
    for index, row in enumerate(rows):
        bound = np.partition(array[row], -size)[-size] if size else np.inf
        found = np.flatnonzero(array[row] >= bound)  # more than size if several equal the bound
        if len(found) < size:  # NaN
            found = np.arange(size)
        ids[index] = found[np.argsort(-array[row, found], kind="stable")[:size]]
    return torch.from_numpy(ids)


def ordered_keys(values: Tensor) -> Tensor:
    """int64 [R, V], all different within a row, in the order that `largest` promises."""
    width = values.shape[1]
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # as the numbers rise
    return rising * _KEY_BITS + torch.arange(width - 1, -1, -1, device=values.device)
