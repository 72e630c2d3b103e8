"""The KV memory: one zero-filled tensor, viewed as blocks of each cache group.

Layout: `[block][layer][K, V][kv_head][page][head_dim]`. Block-major, so that a block is contiguous
and moving it is a plain copy; the keys of one head and page are contiguous, which is the fast order
for attention. Block b of a group is in chunk `b // blocks_per_chunk`; all groups view the same
bytes, and the scheduler ensures that a chunk belongs to one group at a time.

Owns: allocation, the views, copies of blocks within the pool. Does not own: which request a block
belongs to (the scheduler), the number of chunks (pool_size.py), copies out of the pool (swap.py).
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

import numpy as np
import torch

from protos.plan import Int32
from worker.kv.geometry import CacheGeometry


class KvPool:
    """`num_chunks` zero-filled chunks, including the two reserved ones."""

    def __init__(
        self, geometry: CacheGeometry, num_chunks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if dtype.itemsize != geometry.itemsize:
            raise ValueError(f"{dtype} has {dtype.itemsize} bytes, geometry {geometry.itemsize}")
        self.geometry = geometry
        self.num_chunks = num_chunks
        num_items = num_chunks * geometry.chunk_bytes // geometry.itemsize
        # zeros, not `empty`: 0 * NaN from recycled memory would poison masked attention weights
        if device.type == "cpu":
            self.memory = _lazy_zeros(num_items * dtype.itemsize).view(dtype)
        else:
            self.memory = torch.zeros(num_items, dtype=dtype, device=device)
        # per group, items of a block
        self.block_items = [
            geometry.block_bytes(group) // geometry.itemsize for group in geometry.groups
        ]
        # per group [num_blocks, layer slots, 2, num_kv_heads, page_size, head_dim]
        self._blocks = [
            self.memory.view(
                num_chunks * group.blocks_per_chunk,
                group.num_slots,
                2,
                num_kv_heads,
                geometry.page_size,
                head_dim,
            )
            for group in geometry.groups
            for num_kv_heads, head_dim in [geometry.kv_shape(group)]
        ]
        self._layer_views = {
            layer: (index, self._blocks[index][:, place])
            for index, group in enumerate(geometry.groups)
            for place, layer in enumerate(group.layers)
        }
        for layer, owner in geometry.shared_layers.items():
            self._layer_views[layer] = self._layer_views[owner]

    @property
    def num_bytes(self) -> int:
        return self.memory.numel() * self.memory.itemsize

    def num_blocks(self, group: int) -> int:
        """Blocks of cache group `group`, including those of the reserved chunks."""
        return self._blocks[group].shape[0]

    def blocks(self, group: int) -> torch.Tensor:
        """All blocks of a group: [num_blocks, layer slots, 2, num_kv_heads, page_size,
        head_dim]."""
        return self._blocks[group]

    def layer_views(self, layer_idx: int) -> tuple[int, torch.Tensor]:
        """The layer's cache group, and its pages [num_blocks, 2, num_kv_heads, page_size,
        head_dim]: a view, strided in the first dimension only."""
        return self._layer_views[layer_idx]

    def copy_blocks(self, copy: Int32) -> None:
        """Copies whole blocks; `copy` is [C, 3] (group, from block, to block).

        The pairs are independent: no destination is the source of another pair.
        """
        for source, target, size in merged_runs(copy, self.block_items):
            self.memory[target : target + size] = self.memory[source : source + size]


def _lazy_zeros(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] on the host, which the system provides on first use: a big pool costs
    nothing at start, and other processes have the memory until it is needed. In huge pages where
    available: a request's KV is scattered, and each small page would cost a page table walk."""
    # private: shared memory gets no huge pages
    memory = mmap.mmap(-1, max(1, num_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def merged_runs(triples: Int32, block_items: list[int]) -> Iterator[tuple[int, int, int]]:
    """The runs (source, target, length), in items, that make up the copies [P, 3] (group, from,
    to).

    The pairs are independent, so their order is free: they are sorted by source, and pairs that
    are adjacent on both sides are merged into one run.
    """
    if not len(triples):
        return
    sizes = np.asarray(block_items, np.int64)[triples[:, 0]]
    sources, targets = triples[:, 1] * sizes, triples[:, 2] * sizes
    order = np.argsort(sources, kind="stable")
    sizes, sources, targets = sizes[order], sources[order], targets[order]
    is_next = (sources[1:] == sources[:-1] + sizes[:-1]) & (
        targets[1:] == targets[:-1] + sizes[:-1]
    )
    firsts = np.flatnonzero(np.concatenate([[True], ~is_next]))
    lengths = np.add.reduceat(sizes, firsts)
    yield from zip(
        sources[firsts].tolist(), targets[firsts].tolist(), lengths.tolist(), strict=True
    )
