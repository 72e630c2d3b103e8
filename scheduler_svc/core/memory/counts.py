"""How much KV memory is free, in numbers: owners of blocks, used blocks of chunks, the rest.

Every question whether blocks fit is answered here, and every change is counted here first. A copy
answers what-if questions, such as what is free once some tables are returned.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from protos.plan import Int32


class Counts:
    """G cache groups that share `num_usable` of `num_chunks` chunks. A group's free blocks are
    those of its own chunks; any group may take the free chunks."""

    def __init__(self, num_chunks: int, num_usable: int, blocks_per_chunk: Sequence[int]) -> None:
        self.num_usable = num_usable
        self.blocks_per_chunk = tuple(blocks_per_chunk)
        self.owners = [np.zeros(num_chunks * n, np.int32) for n in blocks_per_chunk]  # [G][block]
        self.used = [np.zeros(num_chunks, np.int32) for _ in blocks_per_chunk]  # [G][chunk] owned
        self.free_blocks = [0] * len(blocks_per_chunk)  # [G] of the group's chunks
        self.free_chunks = num_usable
        self._is_borrowed = [False] * len(blocks_per_chunk)  # [G] owners and used

    def copy(self) -> Counts:
        """Independent counts, for what-if questions."""
        twin = copy.copy(self)
        twin.owners, twin.used = list(self.owners), list(self.used)
        twin.free_blocks = list(self.free_blocks)
        twin._is_borrowed = [True] * len(self.owners)  # copied on the first write
        return twin

    @property
    def is_sound(self) -> bool:
        """False if `share` has revived more chunks than are free; `give` undoes that. A group that
        took blocks of a chunk before the chunk was freed may owe some until they are drawn: nobody
        is admitted in such a step."""
        return self.free_chunks >= 0 and min(self.free_blocks) >= 0

    def shortfall(self, blocks: Sequence[int]) -> int:
        """Chunks missing for that many more blocks [G]; 0 or less if they fit."""
        return sum(self._chunks_for(blocks)) - self.free_chunks

    def fits(self, blocks: Sequence[int]) -> bool:
        """Whether that many more blocks [G] are free."""
        return self.shortfall(blocks) <= 0

    def take(self, blocks: Sequence[int]) -> None:
        """Counts that many blocks [G] as taken."""
        added = self._chunks_for(blocks)
        self.free_chunks -= sum(added)
        assert self.free_chunks >= 0, f"no room for {list(blocks)} more blocks by group"
        for group, chunks in enumerate(added):
            self.free_blocks[group] += chunks * self.blocks_per_chunk[group] - blocks[group]

    def cancel_take(self, group: int, count: int) -> None:
        """Counts blocks of a group that were taken, but will not be drawn, as free."""
        self.free_blocks[group] += count

    def share(self, group: int, blocks: Int32) -> Int32:
        """Adds an owner to each of these distinct blocks. Returns those that were free."""
        owners = self._own(group)
        owners[blocks] += 1
        revived: Int32 = blocks[owners[blocks] == 1]
        self._use(group, revived, 1)
        return revived

    def give(self, group: int, blocks: Int32) -> Int32:
        """Removes an owner from each of these distinct blocks. Returns those that are free now."""
        owners = self._own(group)
        left = owners[blocks] - 1
        assert (left >= 0).all(), f"blocks {blocks[left < 0]} have no owner to remove"
        owners[blocks] = left
        freed: Int32 = blocks[left == 0]
        self._use(group, freed, -1)
        return freed

    def give_tables(self, tables: Sequence[Int32]) -> None:
        """Removes an owner from each block of tables of all groups [G]."""
        for group, blocks in enumerate(tables):
            self.give(group, blocks)

    def share_tables(self, tables: Sequence[Int32]) -> list[Int32]:
        """Adds an owner to each block of tables of all groups [G]; returns those [G] that were
        free."""
        return [self.share(group, blocks) for group, blocks in enumerate(tables)]

    def free_share(self) -> float:
        """Share of the memory that is free, 0 to 1: free chunks and free blocks of held ones."""
        if not self.num_usable:
            return 0.0
        pairs = zip(self.free_blocks, self.blocks_per_chunk, strict=True)
        return (self.free_chunks + sum(free / n for free, n in pairs)) / self.num_usable

    def _own(self, group: int) -> Int32:
        """The group's owners, to be written."""
        if self._is_borrowed[group]:
            self.owners[group] = self.owners[group].copy()
            self.used[group] = self.used[group].copy()
            self._is_borrowed[group] = False
        return self.owners[group]

    def _use(self, group: int, blocks: Int32, change: int) -> None:
        """Counts distinct blocks as owned (change = 1) or free (-1)."""
        if not len(blocks):
            return
        n, used = self.blocks_per_chunk[group], self.used[group]
        chunks, numbers = blocks, np.ones(len(blocks), np.intp)
        if n > 1:
            chunks, numbers = np.unique(blocks // n, return_counts=True)
        before = used[chunks]
        used[chunks] += (change * numbers).astype(np.int32)
        held = int(((before if change > 0 else used[chunks]) == 0).sum())
        self.free_chunks -= change * held
        self.free_blocks[group] += change * (held * n - len(blocks))

    def _chunks_for(self, blocks: Sequence[int]) -> list[int]:
        """Chunks [G] to take from the pool for that many more blocks [G]."""
        wanted = zip(blocks, self.free_blocks, self.blocks_per_chunk, strict=True)
        return [max(0, -(-(count - free) // n)) for count, free, n in wanted]
