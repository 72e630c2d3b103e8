"""The CPU backend: calls the C kernel through ctypes.

Owns: passing tensors to C as pointers, lengths and strides, also for decoder_stack.py. Does not
own: arithmetic (kernels/paged.c), building it (kernels/build.py), when to use it (backends.py).
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from worker.attention.interface import AttentionCall, GroupTables, StepContext

_DTYPES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
SUPPORTED_DTYPES: Final = tuple(_DTYPES)


class CpuBackend:
    """Attention in C. Bitwise independent of batching and chunking."""

    name = "cpu"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.attend
        self._attend.restype = ctypes.c_int

    def begin_step(self, step: StepContext) -> None:
        self._step = step

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        group, pages = self._step.pool.layer_views(call.layer)
        query, key, value = (
            tensor if tensor.stride(-1) == 1 else tensor.contiguous()
            for tensor in (query, key, value)
        )
        out = torch.empty(query.shape, dtype=query.dtype)
        new = _NewKv(
            k=key.data_ptr(),
            v=value.data_ptr(),
            strides=(*key.stride()[:2], *value.stride()[:2]),
            num_tokens=key.shape[0],
            dtype=_DTYPES[key.dtype],
        )
        c_struct = c_call(call)  # keeps the sinks alive until C has read them
        queries = _Queries(
            q=query.data_ptr(),
            token_stride=query.stride(0),
            head_stride=query.stride(1),
            num_heads=query.shape[1],
            dtype=_DTYPES[query.dtype],
            out=out.data_ptr(),
            call=c_struct,
        )
        if self._attend(
            ctypes.byref(c_pages(pages)),
            ctypes.byref(new),
            ctypes.byref(queries),
            ctypes.byref(c_tables(self._step, self._step.groups[group])),
            torch.get_num_threads(),
        ):
            raise MemoryError("cannot allocate memory for the attention kernel's tiles")
        return out


class CPages(ctypes.Structure):
    """struct kv_layer of kernels/paged.h"""

    _fields_ = [
        ("pages", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    ]


class CCall(ctypes.Structure):
    """struct call"""

    _fields_ = [
        ("sinks", ctypes.c_void_p),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("sliding_window", ctypes.c_int64),
    ]


class CTables(ctypes.Structure):
    """struct tables"""

    _fields_ = [
        ("num_requests", ctypes.c_int64),
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("table_start", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("first_positions", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
    ]


class _NewKv(ctypes.Structure):  # struct new_kv
    _fields_ = [
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("strides", ctypes.c_int64 * 4),
        ("num_tokens", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    ]


class _Queries(ctypes.Structure):  # struct queries
    _fields_ = [
        ("q", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("call", CCall),
    ]


def c_pages(pages: Tensor) -> CPages:
    """For a layer's pages [num_blocks, 2, Hkv, page_size, D], which must outlive it."""
    _, _, num_kv_heads, page_size, head_dim = pages.shape
    return CPages(
        pages=pages.data_ptr(),
        block_stride=pages.stride(0),
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_dim=head_dim,
        dtype=_DTYPES[pages.dtype],
    )


def c_call(call: AttentionCall) -> CCall:
    """The sinks it points to live as long as this struct, not as long as a copy of it."""
    made = CCall(scaling=call.scaling, softcap=call.softcap, sliding_window=call.sliding_window)
    if call.sinks is not None:
        made.kept = call.sinks.to(torch.float32).contiguous()
        made.sinks = made.kept.data_ptr()
    return made


def c_tables(context: StepContext, tables: GroupTables) -> CTables:
    """For the layers of one cache group in one step; `context` and `tables` must outlive it."""
    return CTables(
        num_requests=len(context.seq_lens),
        query_start_loc=context.query_start_loc.data_ptr(),
        seq_lens=context.seq_lens.data_ptr(),
        table_start=tables.table_start.data_ptr(),
        blocks=tables.blocks.data_ptr(),
        first_positions=tables.first_positions.data_ptr(),
        slot_mapping=tables.slot_mapping.data_ptr(),
    )
