"""What-if counting of KV memory: how many blocks a step could still take.

`decide` plans with these counts and `commit` takes what was planned, by the allocators' own rule
for chunks (`chunks_for`), so a committed decision cannot run short. Free blocks of chunks that a
group holds are its own; free chunks, with or without cached content, are anybody's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from protos.plan import Int32
from scheduler_svc.core.allocators import FullAttentionAllocator
from scheduler_svc.core.rows import Rows


class Room:
    """Free blocks of each cache group and free chunks, as they would be."""

    def __init__(self, allocators: list[FullAttentionAllocator]) -> None:
        self._allocators = allocators
        self._free_blocks = [allocator.num_free for allocator in allocators]  # of held chunks
        self._free_chunks = allocators[0].pool.num_free if allocators else 0
        self._owners: dict[tuple[int, int], int] = {}  # (group, block) → owners, where changed
        self._used: dict[tuple[int, int], int] = {}  # (group, chunk) → owned blocks, likewise

    def copy(self) -> Room:
        twin = copy.copy(self)
        twin._free_blocks = list(self._free_blocks)
        twin._owners = dict(self._owners)
        twin._used = dict(self._used)
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

    def share(self, group: int, blocks: Int32) -> bool:
        """One more owner for each block; False when a free one's chunk is no longer there."""
        allocator = self._allocators[group]
        for block in blocks.tolist():
            owners = self.owners(group, block)
            self._owners[group, block] = owners + 1
            if owners:
                continue
            chunk = block // allocator.blocks_per_chunk
            used = self._used.get((group, chunk), int(allocator.used[chunk]))
            self._used[group, chunk] = used + 1
            self._free_blocks[group] -= 1
            if used == 0:
                self._free_chunks -= 1
                self._free_blocks[group] += allocator.blocks_per_chunk
        return self._free_chunks >= 0 and min(self._free_blocks) >= 0

    def give(self, group: int, blocks: Int32) -> None:
        """One owner less for each block; free are those that nobody else owns."""
        allocator = self._allocators[group]
        for block in blocks.tolist():
            owners = self.owners(group, block) - 1
            self._owners[group, block] = owners
            if owners:
                continue
            chunk = block // allocator.blocks_per_chunk
            used = self._used.get((group, chunk), int(allocator.used[chunk])) - 1
            self._used[group, chunk] = used
            self._free_blocks[group] += 1
            if used == 0:
                self._free_chunks += 1
                self._free_blocks[group] -= allocator.blocks_per_chunk

    def give_row(self, rows: Rows, row: int) -> None:
        """Counts all that a row would give back."""
        for group in range(len(self._allocators)):
            self.give(group, rows.blocks_of(group, row))

    def owners(self, group: int, block: int) -> int:
        known = self._owners.get((group, block))
        return int(self._allocators[group].owners[block]) if known is None else known

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
