"""A linear layer over weights that are packed once, for the CPU.

Owns: joining weights, passing tensors to C as pointers and strides. Does not own: how weights are
stored (weight_storage.py), arithmetic (kernels/linear.c, linear_int8.c), which layers of a model
are replaced (packing.py).

The bits of an output row depend on its input row and the weights alone, whatever other rows are
computed with it and on however many threads. Formats, with float32 activations and results:

    float32   sums start from the bias, in the order of the input features, so that rounding grows
              with their number: 2 to 7 times the error of torch's blocked sums at 576 to 11,008
              features (about 1e-6 of the result), more with a large bias; stored in the narrowest
              way that preserves every weight
    float16   weights rounded to 11 bits; half the memory
    int8      integer arithmetic: blocks of 4 bits (GGUF's Q4_1) as they are, times activations of 8
              bits, one scale per 32; other weights rounded to 8 bits, one step per 32, times
              activations of 16 bits, one scale per row
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import nn

from worker.cpu_layers.weight_storage import PANEL, STORAGES, as_float16, as_int8, exactly
from worker.kernels.build import kernel_library

WEIGHT_FORMATS: Final = ("float32", "float16", "int8")


class CLinear(ctypes.Structure):
    """struct linear of kernels/linear.h"""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("format", ctypes.c_int64),
        ("is_int8", ctypes.c_int64),
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

    weight: None  # so that code that reads a weight fails, instead of using a wrong one
    packed: torch.Tensor
    bias: torch.Tensor

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        weight_format: str = "float32",
    ) -> None:
        """One layer, or several over the same input, whose outputs are concatenated: weights
        [out_features, in_features], and a bias [out_features] or None for each.

        Raises KernelUnavailable without a compiler, ValueError for a weight outside the format's
        range.
        """
        super().__init__()
        self._linear, self._scratch_bytes = _functions()
        self.weight = None
        self.weight_format = weight_format
        self.in_features = weights[0].shape[1]
        self.out_features = sum(len(weight) for weight in weights)
        joined = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self.storage, packed = _stored(joined.detach(), weight_format)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("bias", self._joined_bias(weights, biases), persistent=False)
        self.c_struct = CLinear(
            weight=self.packed.data_ptr(),
            bias=self.bias.data_ptr(),
            in_features=self.in_features,
            out_features=self.out_features,
            format=STORAGES.index(self.storage),
            is_int8=weight_format == "int8",
        )
        self.c_pointer = ctypes.addressof(self.c_struct)  # a `struct linear *` for C callers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32 or x.shape[-1] != self.in_features:
            raise TypeError(
                f"x is {x.dtype} {list(x.shape)}; a packed layer needs float32 "
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
        `out` if `accumulate`."""
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
        """Bytes of scratch memory that C callers must provide for `rows` rows."""
        return int(self._scratch_bytes(self.c_pointer, rows))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.weight_format}"

    def _joined_bias(
        self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """[panels * PANEL], zeros where there is no bias."""
        joined = torch.zeros(_up(self.out_features, PANEL))
        begin = 0
        for weight, bias in zip(weights, biases, strict=True):
            if bias is not None:
                joined[begin : begin + len(weight)] = bias.detach()
            begin += len(weight)
        return joined


def _stored(weight: torch.Tensor, weight_format: str) -> tuple[str, torch.Tensor]:
    """The name of the storage for weight [out, in], and the stored bytes."""
    if weight_format == "float32":
        return exactly(weight)
    if weight_format == "float16":
        return "float16", as_float16(weight)
    return as_int8(weight)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
