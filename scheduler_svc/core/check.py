"""The invariants of a state in which no request lives, checked whenever a server falls idle.

Everything is free then. It reads a few arrays, whatever the cache remembers, so that the next
request need not wait. A violation is a bug of ours: it crashes with what was found.
"""

from __future__ import annotations

from scheduler_svc.core.state import State


class InvariantError(AssertionError):
    """The state contradicts itself."""


def check_idle(state: State) -> None:
    """Raises InvariantError unless all rows and blocks are free."""
    require(not state.requests and not state.in_flight, "somebody lives", state.requests)
    rows = state.rows
    require(rows.num_free == rows.num_rows and not rows.running, "rows are lost", rows.num_free)
    require(not len(state.pending), "the queue holds others", len(state.pending))
    num_promised = state.memory.prefix_cache.num_promised
    require(not num_promised, "blocks are promised by nobody", num_promised)
    for pool in (state.memory.device, state.memory.swap):
        require(pool.is_free, "chunks are lost or held twice", pool.chunks.num_free)
        counted = pool.counts.free_chunks, sum(pool.counts.free_blocks)
        require(counted == (pool.counts.num_usable, 0), "free memory is miscounted", counted)
        for group, allocator in enumerate(pool.allocators):
            require(not allocator.owners.any(), "blocks are owned by nobody", group)
            require(not allocator.used.any(), "chunks' use is miscounted", group)
            require(not allocator.num_free, "free blocks are of no chunk", group)
            num_names = len(allocator.name_of), len(allocator.block_of)
            require(num_names[0] == num_names[1], "names and blocks differ", num_names)


def require(holds: object, what: str, found: object) -> None:
    if not holds:
        raise InvariantError(f"{what}: {found}")
