"""The CUDA backend: launches the Triton kernels.

Owns: tile sizes, launches, the workspace for pieces of split requests. Does not own: arithmetic
(triton_kernel.py), when to use it (backends.py).

All of it can be captured in a graph: launches depend on shapes and on step.longest_query only, and
nothing is read back. The first call with a new combination of types, head size and tiles compiles
for seconds; so capture after a warm-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
from torch import Tensor

from worker.attention import triton_kernel as kernels
from worker.attention.interface import AttentionCall, GroupTables, StepContext

# Keys of a piece. Fixed, else a request's bits would depend on the rest of the batch.
_SPLIT: Final = 512
# Space for pieces: at 32 heads of 128 for 4,000 of 512 keys, more than 2 million keys in one step.
# Requests that exceed it are still computed, by fewer programs.
_WORKSPACE_BYTES: Final = 64 * 2**20
_NO_WINDOW: Final = 2**30
_PROGRAMS_PER_PROCESSOR: Final = 2
_REQUESTS_AT_ONCE: Final = 256  # of plan_work
_HEADS_AT_ONCE: Final = 8  # of write_kv
_AMPLE: Final = 160 * 2**10  # bytes of shared memory; no tiles need that much


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one launch of `attend` divides its work."""

    block_m: int  # rows: query tokens times query heads of a KV head
    block_n: int  # keys
    num_warps: int
    num_stages: int  # key tiles in flight, including the one being computed


def choose_tiles(
    rows: int, grouped: int, head_dim: int, itemsize: int, shared_memory: int = _AMPLE
) -> Tiles:
    """Tiles for requests of at most `rows` rows (query tokens times `grouped` query heads of a KV
    head), on a device whose programs may use `shared_memory` bytes. Requests that fit into the
    lowest tile are short.

    Derived for A100 (164 KB of shared memory per processor) and H200 (228 KB), not measured; other
    cards offer 99 KiB per program, where wide heads in float32 need lower tiles of keys. Short
    requests are bound by memory: low tiles, two programs per processor, each with two tiles of keys
    and of values in flight, besides the table entries of a third. Long ones are bound by
    arithmetic: tiles as big as registers allow. float32 cannot use tensor cores.
    """
    row_bytes = padded(head_dim) * itemsize
    block_n = 64 if row_bytes <= 256 else 32
    if row_bytes > 512 and itemsize == 4 and shared_memory < _AMPLE:
        block_n = 16
    lowest = max(16, triton.next_power_of_2(grouped))
    if rows <= lowest:
        return Tiles(lowest, block_n, num_warps=4, num_stages=5 if row_bytes <= 512 else 3)
    if itemsize == 4:
        return Tiles(max(lowest, 64 if head_dim <= 128 else 32), block_n, 8, num_stages=2)
    if rows <= 64 and head_dim <= 128:
        return Tiles(max(lowest, 64), block_n, num_warps=4, num_stages=3)
    return Tiles(max(lowest, 128 if head_dim <= 128 else 64), block_n, 8, num_stages=3)


class TritonBackend:
    """Attention in Triton. The bits of a decoding request do not depend on its batch.

    `split` (keys of a piece: a multiple of every key tile), `workspace_bytes` and `num_programs`
    are parameters for tests, which make them small. By default the programs fill the device.
    """

    name = "triton"

    def __init__(
        self,
        device: torch.device,
        split: int = _SPLIT,
        workspace_bytes: int = _WORKSPACE_BYTES,
        num_programs: int = 0,
    ) -> None:
        self._shared_memory = _AMPLE
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._shared_memory = getattr(properties, "shared_memory_per_block_optin", _AMPLE)
            processors = properties.multi_processor_count
            num_programs = num_programs or processors * _PROGRAMS_PER_PROCESSOR
        self._num_programs = num_programs
        self._split = split
        self._workspace = torch.empty(workspace_bytes // 4, dtype=torch.float32, device=device)
        self._starts: dict[int, Tensor] = {}  # by window: int32 [3, R+1], see plan_work

    def begin_step(self, step: StepContext) -> None:
        self._step = step
        self._starts = {}  # the first layer of each window plans its work

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        group, pages = self._step.pool.layer_views(call.layer)
        tables = self._step.groups[group]
        query, key, value = map(_with_whole_rows, (query, key, value))
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if len(query):
            with torch.cuda.device_of(query):  # triton launches on the current device
                self._write_kv(key, value, pages, tables, out)
                self._attend(query, pages, tables, call, out)
        return out

    def _attend(
        self,
        query: Tensor,
        pages: Tensor,
        tables: GroupTables,
        call: AttentionCall,
        out: Tensor,
    ) -> None:
        step = self._step
        num_tokens, num_heads, head_dim = query.shape
        num_requests = len(step.seq_lens)
        grouped = num_heads // pages.shape[2]
        window = call.sliding_window or _NO_WINDOW
        itemsize = max(query.itemsize, pages.itemsize)  # of a tile, as loaded and as computed with
        shape = (grouped, head_dim, itemsize, self._shared_memory)
        short = choose_tiles(1, *shape)
        tiles = choose_tiles(step.longest_query * grouped, *shape)
        most_parts = len(self._workspace) // (num_heads * (head_dim + 2))
        partials = self._workspace[: most_parts * num_heads * head_dim]
        part_scales = self._workspace[len(partials) :]

        if window not in self._starts:
            starts = torch.empty(3, num_requests + 1, dtype=torch.int32, device=query.device)
            kernels.plan_work[(1,)](
                step.query_start_loc,
                step.seq_lens,
                starts,
                num_requests,
                window,
                most_parts,
                SHORT=short.block_m // grouped,
                TILE=tiles.block_m // grouped,
                SPLIT=self._split,
                BLOCK=_REQUESTS_AT_ONCE,
            )
            self._starts[window] = starts
        starts = self._starts[window]

        def launch(num_programs: int, by: Tiles, split: int) -> None:
            kernels.attend[(num_programs,)](
                query,
                out,
                pages,
                call.sinks,
                step.query_start_loc,
                step.seq_lens,
                tables.table_start,
                tables.blocks,
                tables.first_positions,
                starts,
                partials,
                part_scales,
                num_requests,
                window,
                call.scaling,
                call.softcap,
                *query.stride()[:2],
                pages.stride(0),
                NUM_KV_HEADS=pages.shape[2],
                GROUPED=grouped,
                HEAD_DIM=head_dim,
                PAGE_SIZE=pages.shape[3],
                SPLIT=split,
                CAPPED=call.softcap > 0,
                BLOCK_M=by.block_m,
                BLOCK_N=by.block_n,
                BLOCK_D=padded(head_dim),
                num_warps=by.num_warps,
                num_stages=by.num_stages,
            )

        launch(self._num_programs, short, self._split)
        kernels.merge[(num_requests, num_heads)](
            out,
            call.sinks,
            step.query_start_loc,
            starts,
            partials,
            part_scales,
            num_requests,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=padded(head_dim),
            num_warps=1,
        )
        if step.longest_query > short.block_m // grouped:
            most_tiles = num_tokens // (tiles.block_m // grouped) + num_requests
            launch(most_tiles * pages.shape[2], tiles, 0)

    def _write_kv(
        self, key: Tensor, value: Tensor, pages: Tensor, tables: GroupTables, out: Tensor
    ) -> None:
        num_tokens, num_kv_heads, head_dim = key.shape
        heads = min(_HEADS_AT_ONCE, triton.next_power_of_2(num_kv_heads))
        kernels.write_kv[(num_tokens, triton.cdiv(num_kv_heads, heads))](
            key,
            value,
            pages,
            tables.slot_mapping,
            out,
            self._step.query_start_loc,
            len(self._step.seq_lens),
            *key.stride()[:2],
            *value.stride()[:2],
            pages.stride(0),
            NUM_KV_HEADS=num_kv_heads,
            GROUPED=out.shape[1] // num_kv_heads,
            HEAD_DIM=head_dim,
            PAGE_SIZE=pages.shape[3],
            BLOCK_H=heads,
            BLOCK_D=padded(head_dim),
        )


def _with_whole_rows(tensor: Tensor) -> Tensor:
    """The kernels accept any strides except in the last dimension."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def padded(head_dim: int) -> int:
    """The tile width for head_dim: a power of two, and at least 16, which products need."""
    return max(16, triton.next_power_of_2(head_dim))
