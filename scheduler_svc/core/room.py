"""What-if counting of KV memory: how many blocks a step could still take.

`decide` plans with these counts and `commit` takes what was planned, by the allocators' own rule
for chunks (`chunks_for`), so a committed decision cannot run short.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from scheduler_svc.core.allocators import FullAttentionAllocator
from scheduler_svc.core.state import State


class Room:
    """Free blocks of each cache group and free chunks, as they would be."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._allocators: list[FullAttentionAllocator] = state.allocators
        self._free_blocks = [allocator.num_free for allocator in state.allocators]
        self._free_chunks = state.pool.num_free
        self._still_used: dict[tuple[int, int], int] = {}  # (group, chunk) → owned blocks

    def copy(self) -> Room:
        twin = copy.copy(self)
        twin._free_blocks = list(self._free_blocks)
        twin._still_used = dict(self._still_used)
        return twin

    def fits(self, blocks: Sequence[int]) -> bool:
        """Whether these many more blocks of each group can be taken, all of them or none."""
        return self._chunks_for(blocks) <= self._free_chunks

    def take(self, blocks: Sequence[int]) -> None:
        self._free_chunks -= self._chunks_for(blocks)
        assert self._free_chunks >= 0, f"took {list(blocks)} blocks that were not there"
        for group, allocator in enumerate(self._allocators):
            added = allocator.chunks_for(blocks[group], self._free_blocks[group])
            self._free_blocks[group] += added * allocator.blocks_per_chunk - blocks[group]

    def give_row(self, row: int) -> None:
        """Counts the blocks that the row would give back: those that nobody else owns."""
        for group, allocator in enumerate(self._allocators):
            blocks = self._state.rows.blocks_of(group, row)
            freed = blocks[allocator.owners[blocks] == 1]
            self._free_blocks[group] += len(freed)
            chunks, counts = np.unique(freed // allocator.blocks_per_chunk, return_counts=True)
            for chunk, count in zip(chunks.tolist(), counts.tolist(), strict=True):
                used = self._still_used.get((group, chunk), allocator.used_in(chunk)) - count
                self._still_used[group, chunk] = used
                if used == 0:
                    self._free_chunks += 1
                    self._free_blocks[group] -= allocator.blocks_per_chunk

    def free_share(self) -> float:
        """Free blocks, those of free chunks included, over all blocks: 0 to 1."""
        pool = self._state.pool
        if not pool.num_usable:
            return 0.0
        in_chunks = sum(
            free / allocator.blocks_per_chunk
            for free, allocator in zip(self._free_blocks, self._allocators, strict=True)
        )
        return (self._free_chunks + in_chunks) / pool.num_usable

    def _chunks_for(self, blocks: Sequence[int]) -> int:
        return sum(
            allocator.chunks_for(count, free)
            for allocator, count, free in zip(
                self._allocators, blocks, self._free_blocks, strict=True
            )
        )
