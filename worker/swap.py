"""The swap pool: host memory that holds the KV of offloaded requests, in whole blocks.

One tensor, allocated at start; pinned where the KV pool is on CUDA, so that copies are plain DMA
and need not wait for one another. It has the KV pool's layout, chunk for chunk: swap block b of a
group lies in swap chunk `b // blocks_per_chunk`. A block is one contiguous run of bytes on both
sides, so all pairs of a step become a few runs: neighbours on both sides are copied as one.

Owns: the memory, the copies. Does not own: which swap block holds what (the scheduler), how large
the pool may be (memory.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from protos.plan import Int32
from worker.kv_pool import KvPool


class SwapPool:
    """`num_chunks` chunks beside `pool`; none at all is fine."""

    def __init__(self, pool: KvPool, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self._pool = pool
        self._block_items = [
            pool.geometry.block_bytes(group) // pool.geometry.itemsize
            for group in pool.geometry.groups
        ]
        # not zeroed: only what was written is ever read
        self._memory = torch.empty(
            num_chunks * pool.geometry.chunk_bytes // pool.geometry.itemsize,
            dtype=pool.memory.dtype,
            pin_memory=pool.memory.device.type == "cuda" and num_chunks > 0,
        )

    @property
    def num_bytes(self) -> int:
        return self._memory.numel() * self._memory.itemsize

    def num_blocks(self, group: int) -> int:
        return self.num_chunks * self._pool.geometry.groups[group].blocks_per_chunk

    def take_out(self, swap_out: Int32) -> None:
        """Copy blocks out of the pool, `swap_out` being [O, 3] (group, block, swap block)."""
        for source, target, size in merged_runs(swap_out, self._block_items):
            self._memory[target : target + size].copy_(
                self._pool.memory[source : source + size], non_blocking=True
            )

    def bring_in(self, swap_in: Int32) -> None:
        """Copy blocks back, `swap_in` being [N, 3] (group, swap block, block).

        On CUDA both ways run on the current stream without waiting, so a block that is taken out
        and brought in by the same plan arrives whole.
        """
        for source, target, size in merged_runs(swap_in, self._block_items):
            self._pool.memory[target : target + size].copy_(
                self._memory[source : source + size], non_blocking=True
            )


def merged_runs(triples: Int32, block_items: list[int]) -> Iterator[tuple[int, int, int]]:
    """(source, target, length) of every run that [P, 3] (group, from, to) come down to, in items.

    The pairs are independent of each other, so their order is free: they are taken in the order of
    their sources, and those that follow each other on both sides are one run.
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
