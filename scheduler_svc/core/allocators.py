"""Blocks of one cache group, cut from the pool's chunks.

An allocator knows which blocks are free and how many owners each other one has; which request
owns which block stands in the requests' block tables (rows.py). Capacity is a number that the
caller reads before it takes (room.py); taking more is a broken invariant, and so is giving back
what is free.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from protos.plan import Int32
from scheduler_svc.core.cache_pool import CachePool


class FullAttentionAllocator:
    """Blocks for layers that read every earlier token: ceil(tokens / page_size) per request."""

    def __init__(self, pool: CachePool, page_size: int, blocks_per_chunk: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.blocks_per_chunk = blocks_per_chunk
        num_blocks = pool.num_chunks * blocks_per_chunk
        self.owners = np.zeros(num_blocks, np.int32)  # [block] block tables that name it
        self._stack = np.zeros(num_blocks, np.int32)  # [block] free blocks of chunks we hold
        self.num_free = 0  # of the stack
        self._used = np.zeros(pool.num_chunks, np.int32)  # [chunk] its blocks that are owned
        self._held = np.zeros(pool.num_chunks, np.bool_)  # [chunk] taken from the pool

    def blocks_for(self, num_tokens: Int32) -> Int32:
        """Blocks that requests of these many tokens need. [n] → [n]"""
        return -(-num_tokens // self.page_size)

    def chunks_for(self, num_blocks: int, num_free: int) -> int:
        """Chunks to take from the pool for `num_blocks` more when `num_free` are at hand."""
        return max(0, -(-(num_blocks - num_free) // self.blocks_per_chunk))

    def take(self, count: int) -> Int32:
        """`count` free blocks, now owned once each. [count]"""
        while self.num_free < count:
            self._add_chunk(self.pool.take())
        self.num_free -= count
        blocks = self._stack[self.num_free : self.num_free + count].copy()
        self.owners[blocks] = 1
        np.add.at(self._used, blocks // self.blocks_per_chunk, 1)
        return blocks

    def give(self, blocks: Int32) -> None:
        """Takes one owner from each block; a chunk whose blocks are all free leaves to the pool."""
        if len(blocks) == 0:
            return
        self.owners[blocks] -= 1
        assert self.owners[blocks].min() >= 0, f"blocks given back twice: {blocks.tolist()}"
        freed = blocks[self.owners[blocks] == 0]
        self._stack[self.num_free : self.num_free + len(freed)] = freed[::-1]
        self.num_free += len(freed)
        chunks = freed // self.blocks_per_chunk
        np.subtract.at(self._used, chunks, 1)
        self._drop_chunks(dict.fromkeys(chunks[self._used[chunks] == 0].tolist()))

    @property
    def num_blocks(self) -> int:
        """Blocks that the group could have, were the whole pool its own."""
        return self.pool.num_usable * self.blocks_per_chunk

    @property
    def num_owned(self) -> int:
        return int(self._used.sum())

    def used_in(self, chunk: int) -> int:
        """Blocks of the chunk that are owned."""
        return int(self._used[chunk])

    def free_blocks(self) -> Int32:
        """The free blocks of chunks we hold, for checks."""
        return self._stack[: self.num_free]

    def held_chunks(self) -> list[int]:
        return [int(chunk) for chunk in np.flatnonzero(self._held)]

    def _add_chunk(self, chunk: int) -> None:
        self._held[chunk] = True
        first = chunk * self.blocks_per_chunk
        fresh = np.arange(first + self.blocks_per_chunk - 1, first - 1, -1, dtype=np.int32)
        self._stack[self.num_free : self.num_free + len(fresh)] = fresh
        self.num_free += len(fresh)

    def _drop_chunks(self, chunks: Iterable[int]) -> None:
        free = self._stack[: self.num_free]
        kept = free[self._used[free // self.blocks_per_chunk] > 0]
        self._stack[: len(kept)] = kept
        self.num_free = len(kept)
        for chunk in chunks:
            self._held[chunk] = False
            self.pool.give(chunk)
