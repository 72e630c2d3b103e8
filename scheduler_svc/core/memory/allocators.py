"""Which blocks of one cache group are free, and what they still cache.

A chunk belongs to a group while one of its blocks is owned, else to the pool, cached content or
not. Owners are counted first (counts.py); here free blocks are picked and full blocks get names
(block_names.py). Drawing more than has been counted is a broken invariant.
"""

from __future__ import annotations

import numpy as np

from protos.plan import Int32
from scheduler_svc.core.memory.block_names import Name
from scheduler_svc.core.memory.cache_events import CacheEvents
from scheduler_svc.core.memory.cache_pool import CachePool
from scheduler_svc.core.memory.counts import Counts


class FullAttentionAllocator:
    """Blocks for layers that read every earlier token: ceil(tokens / page_size) per request."""

    def __init__(
        self, pool: CachePool, counts: Counts, group: int, page_size: int, sliding_window: int = 0
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.sliding_window = sliding_window
        self.blocks_per_chunk = counts.blocks_per_chunk[group]
        self.owners = counts.owners[group]  # [block]
        self.used = counts.used[group]  # [chunk] number of owned blocks
        self.free: dict[int, None] = {}  # free blocks of the group's chunks, without content
        self.cached: dict[int, None] = {}  # those with content, least recently used first
        self.name_of: dict[int, Name] = {}  # block → name, owned or free
        self.block_of: dict[Name, int] = {}
        self.events: CacheEvents | None = None  # told what is forgotten, if anybody listens
        # [block] how often its name was forgotten: unchanged while a named block keeps its content
        self.stamps = np.zeros(len(self.owners), np.int64)

    @property
    def num_blocks(self) -> int:
        """Blocks of the group if it held the whole pool."""
        return self.pool.num_usable * self.blocks_per_chunk

    @property
    def num_owned(self) -> int:
        return int(self.used.sum())

    @property
    def num_free(self) -> int:
        """Free blocks of the group's chunks, cached ones included."""
        return len(self.free) + len(self.cached)

    @property
    def num_cached(self) -> int:
        """Free blocks with content, in the group's chunks and the pool's."""
        named = np.fromiter(self.name_of, np.int32, len(self.name_of))
        return int(np.count_nonzero(self.owners[named] == 0))

    def first_page(self, position: int) -> int:
        """The first page that a query at `position` reads."""
        return int(self.first_pages(np.array([position]))[0])

    def first_pages(self, positions: Int32) -> Int32:
        """The first pages that queries at these positions read. [n] → [n]"""
        return np.zeros_like(positions)

    def draw(self, count: int) -> Int32:
        """Picks free blocks, which get one owner each and lose their names. [count]"""
        drawn = np.array([self._draw_one() for _ in range(count)], np.int32)
        self.owners[drawn] = 1
        return drawn

    def revive(self, blocks: Int32) -> None:
        """Removes blocks that got an owner again from the free ones; they must have content."""
        for block in blocks.tolist():
            assert block in self.name_of, f"shared block {block} is free and has no content"
            if block not in self.cached:
                chunk = block // self.blocks_per_chunk
                self.pool.revive(chunk)
                self._hold(chunk)
            del self.cached[block]

    def put_back(self, blocks: Int32) -> None:
        """Frees blocks that have lost their last owner; they keep their content."""
        chunks = blocks // self.blocks_per_chunk
        is_unused = self.used[chunks] == 0
        for block in blocks[~is_unused].tolist():
            (self.cached if block in self.name_of else self.free)[block] = None
        unused = chunks[is_unused].tolist()
        for chunk in reversed(dict.fromkeys(reversed(unused))):  # in order of their last blocks
            self._release(chunk)

    def publish(self, block: int, name: Name) -> bool:
        """Names an owned block's content for sharing; the first block of a name wins."""
        is_new = name not in self.block_of and block not in self.name_of
        if is_new:
            self.block_of[name] = block
            self.name_of[block] = name
        return is_new

    def forget(self, block: int) -> None:
        """Removes a block's name; if the block is free, its content is lost."""
        name = self.name_of.pop(block, None)
        if name is not None:
            del self.block_of[name]
            self.stamps[block] += 1
            if self.events is not None:
                self.events.remove(name)
            if block in self.cached:
                del self.cached[block]
                self.free[block] = None

    def flush(self) -> None:
        """Forgets the names of all blocks in the group's chunks."""
        for block in list(self.name_of):
            if self.used[block // self.blocks_per_chunk]:
                self.forget(block)

    def held_chunks(self) -> list[int]:
        """The group's chunks, ascending."""
        return [int(chunk) for chunk in np.flatnonzero(self.used)]

    def _draw_one(self) -> int:
        if not self.free and self.cached and self.pool.clean and self.pool.num_spare > 0:
            self.pool.num_spare -= 1
            self._hold(self.pool.take())
        if not self.free and not self.cached:
            self._hold(self.pool.take())
        if self.free:
            block, _ = self.free.popitem()
        else:
            block = next(iter(self.cached))
            self.forget(block)
            del self.free[block]
        self.used[block // self.blocks_per_chunk] += 1
        return block

    def _blocks_of(self, chunk: int) -> range:
        return range(chunk * self.blocks_per_chunk, (chunk + 1) * self.blocks_per_chunk)

    def _hold(self, chunk: int) -> None:
        """Adds a chunk, whose blocks are all free, some perhaps with content."""
        for block in reversed(self._blocks_of(chunk)):
            (self.cached if block in self.name_of else self.free)[block] = None

    def _release(self, chunk: int) -> None:
        """Returns a chunk without owned blocks to the pool."""
        blocks = self._blocks_of(chunk)
        for block in blocks:
            self.free.pop(block, None)
            self.cached.pop(block, None)
        has_content = any(block in self.name_of for block in blocks)
        self.pool.give(chunk, self._forget_chunk if has_content else None)

    def _forget_chunk(self, chunk: int) -> None:
        for block in self._blocks_of(chunk):
            self.forget(block)


class SlidingAttentionAllocator(FullAttentionAllocator):
    """Blocks for layers that read the last `sliding_window` tokens, the current one included.

    A request keeps only pages that later queries read; its table starts at `first_page`.
    """

    def first_pages(self, positions: Int32) -> Int32:
        return np.maximum(0, positions - self.sliding_window + 1) // self.page_size
