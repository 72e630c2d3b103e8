"""The KV memory in its coarsest unit: chunks, which the allocators of all cache groups share.

The first two chunks are reserved: padding reads chunk 0 and writes chunk 1, so neither is ever
given out. A free chunk may still hold cached blocks of the group it belonged to last. Clean chunks
are taken first (a stack: the one given back last, while it is warm), then those with content, the
least recently used first, and their content is forgotten. Until then a prefix hit can revive them.
"""

from __future__ import annotations

from collections.abc import Callable

from protos.plan import NUM_RESERVED_CHUNKS

Forget = Callable[[int], None]  # told which chunk loses its content


class CachePool:
    """Which chunks are free. Taking from an empty pool is a broken invariant: count first."""

    def __init__(self, num_chunks: int, reserved: int = NUM_RESERVED_CHUNKS) -> None:
        self.num_chunks = num_chunks
        self.reserved = reserved
        self.clean = list(range(num_chunks - 1, reserved - 1, -1))
        self.cached: dict[int, Forget] = {}  # least recently freed first
        # clean chunks that an allocator may take only to spare cached content that it holds
        # itself: what the step in the making leaves free
        self.num_spare = 0

    @property
    def num_free(self) -> int:
        return len(self.clean) + len(self.cached)

    @property
    def num_usable(self) -> int:
        """Chunks that can ever be free."""
        return max(0, self.num_chunks - self.reserved)

    def take(self) -> int:
        if self.clean:
            return self.clean.pop()
        chunk = next(iter(self.cached))
        forget = self.cached.pop(chunk)
        forget(chunk)
        return chunk

    def give(self, chunk: int, forget: Forget | None = None) -> None:
        """Takes a chunk back; with `forget`, it holds cached blocks."""
        assert self.reserved <= chunk < self.num_chunks, f"chunk {chunk} is not the pool's"
        if forget is None:
            self.clean.append(chunk)
        else:
            self.cached[chunk] = forget

    def revive(self, chunk: int) -> None:
        """Takes a particular free chunk for the group whose cached blocks it holds."""
        del self.cached[chunk]

    def flush(self) -> None:
        """Forgets all cached content of free chunks."""
        for chunk, forget in self.cached.items():
            forget(chunk)
            self.clean.append(chunk)
        self.cached.clear()
