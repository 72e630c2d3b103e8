"""The chunks of KV memory, which the allocators of all cache groups share.

Two chunks of the device's pool are never handed out: padding reads chunk 0 and writes chunk 1. A
free chunk may still hold cached blocks of its last group, which a prefix hit can revive. Clean
chunks are taken first (a stack: the last returned is warm), then cached ones, least recently used
first, whose content is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable

from protos.plan import NUM_RESERVED_CHUNKS

Forget = Callable[[int], None]  # called with the chunk that loses its content


class CachePool:
    """The free chunks. Callers count first: taking from an empty pool is a broken invariant."""

    def __init__(self, num_chunks: int, reserved: int = NUM_RESERVED_CHUNKS) -> None:
        self.num_chunks = num_chunks
        self.reserved = reserved
        self.num_usable = max(0, num_chunks - reserved)
        self.clean = list(range(num_chunks - 1, reserved - 1, -1))
        self.cached: dict[int, Forget] = {}  # least recently freed first
        # clean chunks that the step being drawn does not need: an allocator may take them rather
        # than reclaim its own cached blocks
        self.num_spare = 0

    @property
    def num_free(self) -> int:
        return len(self.clean) + len(self.cached)

    def take(self) -> int:
        """Takes a free chunk, clean ones first."""
        if self.clean:
            return self.clean.pop()
        chunk = next(iter(self.cached))
        forget = self.cached.pop(chunk)
        forget(chunk)
        return chunk

    def give(self, chunk: int, forget: Forget | None = None) -> None:
        """Returns a chunk to the pool; with `forget`, it holds cached blocks."""
        assert self.reserved <= chunk < self.num_chunks, (
            f"returned chunk {chunk}; allowed: {self.reserved} to {self.num_chunks - 1}"
        )
        if forget is None:
            self.clean.append(chunk)
        else:
            self.cached[chunk] = forget

    def revive(self, chunk: int) -> None:
        """Takes this free chunk for the group whose cached blocks it holds."""
        del self.cached[chunk]

    def flush(self) -> None:
        """Forgets the cached content of all free chunks."""
        for chunk, forget in self.cached.items():
            forget(chunk)
            self.clean.append(chunk)
        self.cached.clear()
