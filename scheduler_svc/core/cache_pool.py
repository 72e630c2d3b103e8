"""The KV memory in its coarsest unit: chunks, which the allocators of all cache groups share.

The first two chunks are reserved: padding reads chunk 0 and writes chunk 1, so neither is ever
given out. Free chunks form a stack: the one given back last is taken first, while it is warm.
"""

from __future__ import annotations

from protos.plan import NUM_RESERVED_CHUNKS


class CachePool:
    """Which chunks are free. Taking from an empty pool is a broken invariant: count first."""

    def __init__(self, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self.free = list(range(num_chunks - 1, NUM_RESERVED_CHUNKS - 1, -1))

    @property
    def num_free(self) -> int:
        return len(self.free)

    @property
    def num_usable(self) -> int:
        """Chunks that can ever be free."""
        return max(0, self.num_chunks - NUM_RESERVED_CHUNKS)

    def take(self) -> int:
        return self.free.pop()

    def give(self, chunk: int) -> None:
        assert NUM_RESERVED_CHUNKS <= chunk < self.num_chunks, f"chunk {chunk} is not the pool's"
        self.free.append(chunk)
