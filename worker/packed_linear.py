"""A linear layer over weights that are packed once, for the CPU.

Owns: packing and quantising weights, and handing tensors to C as pointers and strides. Does not
own: arithmetic (kernels/linear.c, linear_int8.c), or which layers of a model are replaced
(packing.py).

The bits of a result's row depend on that row and the weights alone, whatever other rows are
computed with it and on however many threads. Formats, with float32 activations and results:

    float32   as precise as torch's; stored in the narrowest way that gives every weight back
    float16   weights rounded to 11 bits; half the memory
    int8      weights rounded to 8 bits, one scale per output feature; activations to 7 bits, one
              scale for 64 of a row; a quarter of the memory
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn

from worker.kernels.build import kernel_library
from worker.weight_storage import PANEL, STORAGES, as_float16, exactly

WEIGHT_FORMATS: Final = ("float32", "float16", "int8")

_GROUP, _OFFSET = 64, 64  # GROUP and OFFSET of linear_int8.c
_AT_ONCE: Final = 4096  # output features packed at once; a multiple of PANEL


class CLinear(ctypes.Structure):
    """struct linear of kernels/linear.h"""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("format", ctypes.c_int64),
    ]


@functools.cache
def _functions() -> tuple[Callable[..., None], Callable[..., int]]:
    """linear and linear_scratch of linear.h"""
    library = kernel_library()
    library.linear.restype = None
    library.linear.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_int,
    ]
    library.linear_scratch.restype = ctypes.c_size_t
    library.linear_scratch.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    return library.linear, library.linear_scratch


class PackedLinear(nn.Module):
    """x[..., in_features] -> [..., out_features], float32 on the CPU; no gradients."""

    weight: None  # what looks for one finds that there is none, instead of a wrong one
    packed: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        weight_format: str = "float32",
    ) -> None:
        """Of one layer, or of several over the same input, whose outputs are to follow each other:
        weights [out_features, in_features], and a bias [out_features] or None for each.

        Raises KernelUnavailable without a compiler, ValueError for a weight that the format cannot
        hold.
        """
        super().__init__()
        self._linear, self._scratch_bytes = _functions()
        self.weight = None
        self.weight_format = weight_format
        self.in_features = weights[0].shape[1]
        self.out_features = sum(len(weight) for weight in weights)
        joined = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self.storage, packed, scale = _packed(joined.detach(), weight_format)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("bias", self._joined_bias(weights, biases), persistent=False)
        self.c_struct = CLinear(
            weight=self.packed.data_ptr(),
            scale=None if scale is None else scale.data_ptr(),
            bias=self.bias.data_ptr(),
            in_features=self.in_features,
            out_features=self.out_features,
            format=STORAGES.index(self.storage),
        )
        self.c_pointer = ctypes.addressof(self.c_struct)  # a `struct linear *` for C callers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32 or x.shape[-1] != self.in_features:
            raise TypeError(
                f"x is {x.dtype} {list(x.shape)}; a packed layer takes float32 "
                f"[..., {self.in_features}]"
            )
        rows = x if x.ndim == 2 else x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty((*x.shape[:-1], self.out_features))
        self.compute(rows.data_ptr(), rows.stride(0), len(rows), out.data_ptr(), self.out_features)
        return out

    def compute(
        self, x: int, x_stride: int, rows: int, out: int, out_stride: int, accumulate: bool = False
    ) -> None:
        """From float32 rows at address `x` to rows at address `out`, strides in elements; adds to
        what `out` holds if `accumulate`."""
        scratch = None
        if self.weight_format == "int8":
            scratch = torch.empty(self.scratch_bytes(rows), dtype=torch.uint8)
        self._linear(
            self.c_pointer,
            x,
            x_stride,
            rows,
            out,
            out_stride,
            accumulate,
            None if scratch is None else scratch.data_ptr(),
            torch.get_num_threads(),
        )

    def scratch_bytes(self, rows: int) -> int:
        """What C callers of this layer must bring along for so many rows."""
        return int(self._scratch_bytes(self.c_pointer, rows))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.weight_format}"

    def _joined_bias(
        self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """[panels * PANEL], zeros where there is none."""
        joined = torch.zeros(_up(self.out_features, PANEL))
        begin = 0
        for weight, bias in zip(weights, biases, strict=True):
            if bias is not None:
                joined[begin : begin + len(weight)] = bias.detach()
            begin += len(weight)
        return joined


def _packed(
    weight: torch.Tensor, weight_format: str
) -> tuple[str, torch.Tensor, torch.Tensor | None]:
    """[out, in] as linear.h wants it: its storage, its bytes, and int8's scales."""
    if weight_format == "float32":
        return *exactly(weight), None
    if weight_format == "float16":
        return "float16", as_float16(weight), None
    return "int8", *_as_int8(weight)


def _as_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[panels][groups] of linear_int8.c's struct group, uint8, and float32 scales."""
    out_features, in_features = weight.shape
    panels, groups = -(-out_features // PANEL), -(-in_features // _GROUP)
    packed = torch.empty(panels, groups, 4 * PANEL + _GROUP * PANEL, dtype=torch.uint8)
    scale = torch.zeros(panels * PANEL)
    for first in range(0, out_features, _AT_ONCE):
        part = weight[first : first + _AT_ONCE]
        here = packed[first // PANEL : -(-(first + len(part)) // PANEL)]
        part, scale[first : first + len(part)] = _quantised(part)
        part = F.pad(part, (0, groups * _GROUP - in_features, 0, PANEL * len(here) - len(part)))
        by_group = part.view(len(here), PANEL, groups, _GROUP // 4, 4).permute(0, 2, 3, 1, 4)
        starts = by_group.sum(dim=(2, 4), dtype=torch.int32) * -_OFFSET
        here[..., : 4 * PANEL] = starts.view(torch.uint8)
        here[..., 4 * PANEL :] = by_group.flatten(2).view(torch.uint8)
    return packed, scale


def _quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [out, in] and float32 scales [out], symmetric: an output feature's largest is 127."""
    largest = weight.abs().amax(dim=1)
    if not torch.isfinite(largest).all():
        raise ValueError("a weight is not finite, so it has no int8 value")
    steps = torch.where(largest > 0, 127 / largest, 0)
    return (weight * steps[:, None]).round().to(torch.int8), largest / 127


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
