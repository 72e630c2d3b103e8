"""What-if counting of KV memory: how many blocks a step could still take.

`decide` plans with these counts and `commit` takes what was planned, by the allocators' own rule
for chunks (`chunks_for`), so a committed decision cannot run short. Free blocks of chunks that a
group holds are its own; free chunks, with or without cached content, are anybody's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from protos.plan import Int32
from scheduler_svc.core.allocators import FullAttentionAllocator
from scheduler_svc.core.rows import Rows


class Room:
    """Free blocks of each cache group and free chunks, as they would be."""

    def __init__(self, allocators: list[FullAttentionAllocator]) -> None:
        self._allocators = allocators
        self._free_blocks = [allocator.num_free for allocator in allocators]  # of held chunks
        self._free_chunks = allocators[0].pool.num_free if allocators else 0
        # changes to owners [G][block] and to the owned blocks of chunks [G][chunk]; made at need
        self._owners: list[Int32 | None] = [None] * len(allocators)
        self._used: list[Int32 | None] = [None] * len(allocators)

    def copy(self) -> Room:
        twin = copy.copy(self)
        twin._free_blocks = list(self._free_blocks)
        twin._owners = [None if changes is None else changes.copy() for changes in self._owners]
        twin._used = [None if changes is None else changes.copy() for changes in self._used]
        return twin

    def fits(self, blocks: Sequence[int]) -> bool:
        """Whether these many more blocks of each group can be taken, all of them or none."""
        return self.shortfall(blocks) <= 0

    def shortfall(self, blocks: Sequence[int]) -> int:
        """Chunks that are missing for these many more blocks of each group; 0 or less if none."""
        return self._chunks_for(blocks) - self._free_chunks

    def take(self, blocks: Sequence[int]) -> None:
        self._free_chunks -= self._chunks_for(blocks)
        assert self._free_chunks >= 0, f"took {list(blocks)} blocks that were not there"
        for group, allocator in enumerate(self._allocators):
            added = allocator.chunks_for(blocks[group], self._free_blocks[group])
            self._free_blocks[group] += added * allocator.blocks_per_chunk - blocks[group]

    def share(self, group: int, blocks: Int32) -> bool:
        """One more owner for each of these (different) blocks; False when there was no room for
        it: a free one's chunk is no longer there. `give` undoes it."""
        if len(blocks):
            owners = self._change_owners(group, blocks, 1)
            self._use(group, blocks[owners == 1], 1)
        return self._free_chunks >= 0 and min(self._free_blocks) >= 0

    def give(self, group: int, blocks: Int32) -> None:
        """One owner less for each block; free are those that nobody else owns."""
        if len(blocks):
            owners = self._change_owners(group, blocks, -1)
            self._use(group, blocks[owners == 0], -1)

    def _change_owners(self, group: int, blocks: Int32, change: int) -> Int32:
        """How many owners the blocks have then."""
        changes = self._owners[group]
        if changes is None:
            changes = self._owners[group] = np.zeros_like(self._allocators[group].owners)
        changes[blocks] += change
        owners: Int32 = self._allocators[group].owners[blocks] + changes[blocks]
        return owners

    def _use(self, group: int, blocks: Int32, change: int) -> None:
        """These blocks are used now (change = 1), or free (-1)."""
        if not len(blocks):
            return
        allocator, changes = self._allocators[group], self._used[group]
        if changes is None:
            changes = self._used[group] = np.zeros_like(allocator.used)
        chunks, counts = blocks, np.ones(len(blocks), np.intp)
        if allocator.blocks_per_chunk > 1:
            chunks, counts = np.unique(blocks // allocator.blocks_per_chunk, return_counts=True)
        used = allocator.used[chunks] + changes[chunks]
        changes[chunks] += (change * counts).astype(np.int32)
        held = int((used == 0).sum() if change > 0 else -(used == counts).sum())
        self._free_chunks -= held
        self._free_blocks[group] += held * allocator.blocks_per_chunk - change * len(blocks)

    def give_row(self, rows: Rows, row: int) -> None:
        """Counts all that a row would give back."""
        for group in range(len(self._allocators)):
            self.give(group, rows.blocks_of(group, row))

    def share_row(self, rows: Rows, row: int) -> None:
        """Undoes that."""
        for group in range(len(self._allocators)):
            self.share(group, rows.blocks_of(group, row))

    def owners(self, group: int, block: int) -> int:
        changes = self._owners[group]
        owners = int(self._allocators[group].owners[block])
        return owners if changes is None else owners + int(changes[block])

    def free_share(self) -> float:
        """Free blocks, those of free chunks included, over all blocks: 0 to 1."""
        if not self._allocators or not self._allocators[0].pool.num_usable:
            return 0.0
        in_chunks = sum(
            free / allocator.blocks_per_chunk
            for free, allocator in zip(self._free_blocks, self._allocators, strict=True)
        )
        return (self._free_chunks + in_chunks) / self._allocators[0].pool.num_usable

    def _chunks_for(self, blocks: Sequence[int]) -> int:
        return sum(
            allocator.chunks_for(count, free)
            for allocator, count, free in zip(
                self._allocators, blocks, self._free_blocks, strict=True
            )
        )
