"""Blocks of one cache group, cut from the pool's chunks, shared by reference count.

An allocator knows how many owners each block has, which free blocks still hold named content
(block_names.py makes the names) and which chunks it holds; which request owns which block stands
in the requests' block tables (rows.py). A chunk belongs to the group while one of its blocks is
owned, and is the pool's otherwise, with or without cached content.

Capacity is a number that the caller reads before it takes (room.py); taking more is a broken
invariant, and so is giving back what is free.
"""

from __future__ import annotations

import numpy as np

from protos.plan import Int32
from scheduler_svc.core.cache_pool import CachePool

Name = bytes  # of a full block's content: see block_names.py


class FullAttentionAllocator:
    """Blocks for layers that read every earlier token: ceil(tokens / page_size) per request."""

    sliding_window = 0  # none

    def __init__(self, pool: CachePool, page_size: int, blocks_per_chunk: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.blocks_per_chunk = blocks_per_chunk
        self.owners = np.zeros(pool.num_chunks * blocks_per_chunk, np.int32)  # [block]
        self.used = np.zeros(pool.num_chunks, np.int32)  # [chunk] its blocks that are owned
        self.free: dict[int, None] = {}  # blocks of our chunks without owner or content
        self.cached: dict[int, None] = {}  # those with content, least recently used first
        self.name_of: dict[int, Name] = {}  # block → name, whether owned or free
        self.block_of: dict[Name, int] = {}
        # [block] how often its name was forgotten: a named block has it still if this is unchanged
        self.stamps = np.zeros(len(self.owners), np.int64)

    @property
    def num_blocks(self) -> int:
        """Blocks that the group could have, were the whole pool its own."""
        return self.pool.num_usable * self.blocks_per_chunk

    @property
    def num_owned(self) -> int:
        return int(self.used.sum())

    @property
    def num_free(self) -> int:
        """Free blocks of chunks that the group holds; cached ones count."""
        return len(self.free) + len(self.cached)

    @property
    def num_cached(self) -> int:
        """Free blocks with content, those of the pool's chunks included."""
        named = np.fromiter(self.name_of, np.int32, len(self.name_of))
        return int(np.count_nonzero(self.owners[named] == 0))

    def first_page(self, position: int) -> int:
        """The first page that a query at this position reads."""
        return int(self.first_pages(np.array([position]))[0])

    def first_pages(self, positions: Int32) -> Int32:
        """The same for many positions. [n] → [n]"""
        return np.zeros_like(positions)

    def chunks_for(self, num_blocks: int, num_free: int) -> int:
        """Chunks to take from the pool for `num_blocks` more when `num_free` are at hand."""
        return max(0, -(-(num_blocks - num_free) // self.blocks_per_chunk))

    def take(self, count: int) -> Int32:
        """`count` blocks, now owned once each and without a name. [count]"""
        blocks = [self._take_one() for _ in range(count)]
        taken = np.array(blocks, np.int32)
        self.owners[taken] = 1
        return taken

    def share(self, blocks: Int32) -> None:
        """One more owner for each of these different blocks; free ones with content revive."""
        for block in blocks[self.owners[blocks] == 0].tolist():
            assert block in self.name_of, f"block {block} is free and has no content to share"
            chunk = block // self.blocks_per_chunk
            if self.used[chunk] == 0:
                self.pool.revive(chunk)
                self._hold(chunk)
            del self.cached[block]
            self.used[chunk] += 1
        self.owners[blocks] += 1

    def give(self, blocks: Int32) -> None:
        """Takes one owner from each of these different blocks. What nobody owns is free, but keeps
        its content."""
        left = self.owners[blocks] - 1
        assert (left >= 0).all(), f"of the blocks {blocks} some were given back twice"
        self.owners[blocks] = left
        for block in blocks[left == 0].tolist():
            (self.cached if block in self.name_of else self.free)[block] = None
            chunk = block // self.blocks_per_chunk
            self.used[chunk] -= 1
            if self.used[chunk] == 0:
                self._release(chunk)

    def publish(self, block: int, name: Name) -> None:
        """Names an owned block's content, so that others can share it; the first one wins."""
        if name not in self.block_of and block not in self.name_of:
            self.block_of[name] = block
            self.name_of[block] = name

    def forget(self, block: int) -> None:
        """Takes a block's name away; if it is free, it has no content any more."""
        name = self.name_of.pop(block, None)
        if name is not None:
            del self.block_of[name]
            self.stamps[block] += 1
            if block in self.cached:
                del self.cached[block]
                self.free[block] = None

    def flush(self) -> None:
        """Forgets the content of everything that nobody owns, and the names of the rest."""
        for block in list(self.name_of):
            chunk = block // self.blocks_per_chunk
            if self.used[chunk]:
                self.forget(block)

    def held_chunks(self) -> list[int]:
        return [int(chunk) for chunk in np.flatnonzero(self.used)]

    def _take_one(self) -> int:
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

    def _hold(self, chunk: int) -> None:
        """The chunk's blocks are ours: all of them free, some perhaps with content."""
        first = chunk * self.blocks_per_chunk
        for block in range(first + self.blocks_per_chunk - 1, first - 1, -1):
            (self.cached if block in self.name_of else self.free)[block] = None

    def _release(self, chunk: int) -> None:
        first = chunk * self.blocks_per_chunk
        has_content = False
        for block in range(first, first + self.blocks_per_chunk):
            if block in self.free:
                del self.free[block]
            else:
                del self.cached[block]
                has_content = True
        self.pool.give(chunk, self._forget_chunk if has_content else None)

    def _forget_chunk(self, chunk: int) -> None:
        first = chunk * self.blocks_per_chunk
        for block in range(first, first + self.blocks_per_chunk):
            self.forget(block)


class SlidingAttentionAllocator(FullAttentionAllocator):
    """Blocks for layers that read the last `sliding_window` tokens, the current one included.

    A request keeps only the pages that a later query reads; its table begins at `first_page`.
    """

    def __init__(
        self, pool: CachePool, page_size: int, blocks_per_chunk: int, sliding_window: int
    ) -> None:
        super().__init__(pool, page_size, blocks_per_chunk)
        self.sliding_window = sliding_window

    def first_pages(self, positions: Int32) -> Int32:
        return np.maximum(0, positions - self.sliding_window + 1) // self.page_size
