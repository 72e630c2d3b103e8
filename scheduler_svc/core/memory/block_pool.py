"""One pool of blocks for all cache groups: on the device, or in the host's swap space."""

from __future__ import annotations

from collections.abc import Sequence

from protos.plan import Int32
from scheduler_svc.core.limits import Geometry
from scheduler_svc.core.memory.allocators import FullAttentionAllocator, SlidingAttentionAllocator
from scheduler_svc.core.memory.cache_pool import CachePool
from scheduler_svc.core.memory.counts import Counts


class BlockPool:
    """G cache groups over one pool of chunks, two chunks reserved or none. `take` counts blocks at
    once; `draw` picks them when the step is complete, so that it reclaims no block that it shares.
    """

    def __init__(self, geometry: Geometry, num_chunks: int, reserved: int) -> None:
        self.chunks = CachePool(num_chunks, reserved)
        per_chunk = [group.blocks_per_chunk for group in geometry.groups]
        self.counts = Counts(num_chunks, self.chunks.num_usable, per_chunk)
        shared, page_size = (self.chunks, self.counts), geometry.page_size
        self.allocators: list[FullAttentionAllocator] = []
        for index, group in enumerate(geometry.groups):
            kind = SlidingAttentionAllocator if group.sliding_window else FullAttentionAllocator
            self.allocators.append(kind(*shared, index, page_size, group.sliding_window))

    @property
    def is_free(self) -> bool:
        """Whether no block has an owner."""
        return self.chunks.num_free == self.chunks.num_usable

    def take(self, blocks: Sequence[int], shared: Sequence[Int32] = ()) -> bool:
        """Counts blocks[g] new blocks of each group as taken and adds an owner to each block of the
        tables shared[g]. All or nothing; False if they do not fit."""
        counts = self.counts
        if not counts.fits(blocks):
            return False  # sharing would need even more
        if shared:
            revived = counts.share_tables(shared)
            if not (counts.is_sound and counts.fits(blocks)):
                counts.give_tables(shared)
                return False
            for allocator, table in zip(self.allocators, revived, strict=True):
                allocator.revive(table)
        counts.take(blocks)
        return True

    def give(self, group: int, blocks: Int32) -> None:
        """Removes an owner from each of these distinct blocks."""
        self.allocators[group].put_back(self.counts.give(group, blocks))

    def give_tables(self, tables: Sequence[Int32]) -> None:
        """Removes an owner from each block of tables [G]; last blocks are reclaimed first."""
        for group, blocks in enumerate(tables):
            self.give(group, blocks[::-1])

    def begin_drawing(self, blocks: Sequence[int]) -> None:
        """Announces blocks [G] to draw: chunks beyond those may be used to spare cached content."""
        free = zip(blocks, self.allocators, strict=True)
        needed = sum(max(0, -(-(n - a.num_free) // a.blocks_per_chunk)) for n, a in free)
        self.chunks.num_spare = self.chunks.num_free - needed
        assert self.chunks.num_spare >= 0, f"{-self.chunks.num_spare} chunks missing to draw"

    def draw(self, group: int, count: int) -> Int32:
        """Picks blocks that were counted as taken. [count]"""
        return self.allocators[group].draw(count)

    def end_drawing(self) -> None:
        """Recounts what is free, as spare chunks may have been used."""
        self.counts.free_chunks = self.chunks.num_free
        self.counts.free_blocks = [allocator.num_free for allocator in self.allocators]
        self.chunks.num_spare = 0
