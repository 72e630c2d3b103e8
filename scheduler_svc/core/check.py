"""The invariants of an idle state, checked whenever a server falls idle: everything is free.

The check reads a few arrays, whatever the cache remembers, so that the next request need not wait.
A violation is a bug of ours: it crashes with what was found.
"""

from __future__ import annotations

from scheduler_svc.core.state import State


class InvariantError(AssertionError):
    """The state contradicts itself."""


def check_idle(state: State) -> None:
    """Raises InvariantError unless all rows and blocks are free."""
    rows = state.rows
    require(not state.requests, "requests are live", list(state.requests))
    require(not state.in_flight, "plans are in flight", len(state.in_flight))
    require(rows.num_free == rows.num_rows and not rows.running, "rows are lost", rows.num_free)
    require(not len(state.pending), "the queue is not empty", len(state.pending))
    num_promised = state.memory.prefix_cache.num_promised
    require(not num_promised, "blocks are promised without a request", num_promised)
    for pool in (state.memory.device, state.memory.swap):
        require(pool.is_free, "chunks are lost or held twice", pool.chunks.num_free)
        counted = pool.counts.free_chunks, sum(pool.counts.free_blocks)
        require(counted == (pool.counts.num_usable, 0), "free memory is miscounted", counted)
        for group, allocator in enumerate(pool.allocators):
            require(not allocator.owners.any(), "blocks are owned without a request", group)
            require(not allocator.used.any(), "used blocks of chunks are miscounted", group)
            require(not allocator.num_free, "free blocks lie in chunks of the pool", group)
            num_names = len(allocator.name_of), len(allocator.block_of)
            require(num_names[0] == num_names[1], "names and blocks differ", num_names)


def require(holds: object, what: str, found: object) -> None:
    """Raises InvariantError, naming `what` is wrong and what was found, unless it holds."""
    if not holds:
        raise InvariantError(f"{what}: {found}")
