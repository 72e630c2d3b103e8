"""The invariants of the state. A violation is a bug of ours: it crashes with what was found.

`check_rows` looks at the rows a step touched, at a cost that does not grow with the pool;
`check_idle` at a state in which nobody lives, as a server that serves does; `check` at everything.
"""

from __future__ import annotations

import numpy as np

from protos.plan import Int32
from scheduler_svc.core.allocators import FullAttentionAllocator
from scheduler_svc.core.cache_pool import CachePool
from scheduler_svc.core.request import NO_ROW, Request, RequestState
from scheduler_svc.core.state import State


class InvariantError(AssertionError):
    """The state contradicts itself."""


def check_rows(state: State, touched: Int32) -> None:
    """The cursors and block tables of the touched rows."""
    rows = state.rows
    touched = touched[[int(row) in rows.running for row in touched]]
    computed, known, outstanding = (
        rows.computed[touched],
        rows.known[touched],
        rows.outstanding[touched],
    )
    _require(
        (outstanding >= 0).all() and (outstanding <= len(state.in_flight)).all(),
        "samples outstanding without a plan in flight",
        outstanding,
    )
    _require((computed <= known + outstanding).all(), "computed past what is known", touched)
    _require((known + outstanding <= rows.limit[touched]).all(), "planned past the end", touched)
    goes_on = ~rows.is_finished[touched] & ~rows.awaits_fork[touched]
    unplanned = np.where(goes_on, rows.limit[touched] - known - outstanding, 0)
    _require((rows.unplanned[touched] == unplanned).all(), "what is unplanned differs", touched)
    pages = -(-computed // state.geometry.page_size)
    for group, allocator in enumerate(state.allocators):
        lengths = rows.table_len[group, touched]
        is_right = (lengths >= pages) if state.policy.holds_finished else (lengths == pages)
        _require(is_right.all(), "a table is not ceil(tokens / page_size) long", touched)
        first = rows.table_first[group, touched]
        _require(
            (first <= allocator.first_pages(computed)).all(),
            "a table begins behind what the next query reads",
            touched,
        )
        for row in touched.tolist():
            blocks = rows.blocks_of(group, row)
            _require((allocator.owners[blocks] > 0).all(), "a table names a free block", row)


def check(state: State) -> None:
    """Everything: each chunk and block accounted for, each request in exactly one place."""
    rows = state.rows
    check_rows(state, rows.order())
    quarantined = [
        tables
        for transfers in [state.transfers, *(step.transfers for step in state.in_flight)]
        for _, tables in transfers.quarantined
    ]
    tables = [
        [rows.blocks_of(group, row) for row in rows.running] + [held[group] for held in quarantined]
        for group in range(len(state.allocators))
    ]
    _check_memory(state.pool, state.allocators, tables)
    offloaded = [r.swapped for r in state.live() if r.swapped is not None]
    swapped: list[list[Int32]] = [
        [swap.blocks[group] for swap in offloaded]
        + [blocks for step in state.in_flight for g, blocks in step.freed_swap if g == group]
        for group in range(len(state.allocators))
    ]
    _check_memory(state.swap_pool, state.swap_allocators, swapped)
    _check_names(state)
    for row, request in rows.running.items():
        _check_running(state, row, request)
    _require(len(rows.running) + rows.num_free == rows.num_rows, "rows are lost", rows.num_free)
    unforked = {id(s) for request in state.live() for s in request.siblings}
    waiting = [r for r in state.live() if r.row == NO_ROW and id(r) not in unforked]
    for request in waiting:
        _require(
            request.state is RequestState.PENDING and request in state.pending,
            "a request without a row is not waiting",
            request,
        )
    _require(len(state.pending) == len(waiting), "the queue holds others", len(state.pending))
    _require(state.num_live == len(list(state.live())), "the live are miscounted", state.num_live)
    order = [state.policy.urgency(request) for request in state.pending.in_order()]
    _require(order == sorted(order), "the queue is out of order", order)


def check_idle(state: State) -> None:
    """What `check` finds when no request lives and no plan is in flight: everything is free. It
    reads a few arrays, whatever the cache remembers, so that the next request need not wait."""
    _require(not state.requests and not state.in_flight, "somebody lives", state.requests)
    rows = state.rows
    _require(rows.num_free == rows.num_rows and not rows.running, "rows are lost", rows.num_free)
    _require(not len(state.pending), "the queue holds others", len(state.pending))
    num_promised = state.prefix_cache.num_promised
    _require(not num_promised, "blocks are promised by nobody", num_promised)
    for pool, allocators in (
        (state.pool, state.allocators),
        (state.swap_pool, state.swap_allocators),
    ):
        _require(pool.num_free == pool.num_usable, "chunks are lost or held twice", pool.num_free)
        for group, allocator in enumerate(allocators):
            _require(not allocator.owners.any(), "blocks are owned by nobody", group)
            _require(not allocator.used.any(), "chunks' use is miscounted", group)
            _require(not allocator.num_free, "free blocks are of no chunk", group)
            num_names = len(allocator.name_of), len(allocator.block_of)
            _require(num_names[0] == num_names[1], "names and blocks differ", num_names)


def _check_running(state: State, row: int, request: Request) -> None:
    rows = state.rows
    _require(request.row == row, "a row's tenant does not know it", request)
    if request.state is RequestState.FINISHED:
        is_held = state.policy.holds_finished or rows.num_in_flight[row] > 0
        _require(is_held, "an ended request holds its row", request)
        return
    family = state.requests.get(request.request_id, [])
    _require(any(r is request for r in family), "a running request is not live", request)
    _require(rows.known[row] == len(request.token_ids), "known differs from token_ids", request)
    _require(request.swapped is None, "a running request is offloaded", request)


def _check_memory(
    pool: CachePool, allocators: list[FullAttentionAllocator], tables: list[list[Int32]]
) -> None:
    chunks: list[int] = [*pool.clean, *pool.cached]
    for group, allocator in enumerate(allocators):
        named = np.concatenate([*tables[group], np.zeros(0, np.int32)])
        owners = np.bincount(named, minlength=len(allocator.owners))
        _require((owners == allocator.owners).all(), "owners differ from the block tables", group)
        used = (owners.reshape(-1, allocator.blocks_per_chunk) > 0).sum(axis=1)
        _require((used == allocator.used).all(), "chunks' use is miscounted", group)
        chunks += allocator.held_chunks()
        free = np.array([*allocator.free, *allocator.cached], np.intp)
        is_free = (owners == 0) & (used > 0).repeat(allocator.blocks_per_chunk)
        times = np.bincount(free, minlength=len(owners))
        _require((times == is_free).all(), "free blocks are lost or doubled", group)
    times = np.bincount(np.array(chunks, np.intp), minlength=pool.num_chunks)
    is_right = (times[: pool.reserved] == 0).all() and (times[pool.reserved :] == 1).all()
    is_right &= len(times) == pool.num_chunks
    _require(is_right, "chunks are lost or held twice", np.flatnonzero(times != 1))


def _check_names(state: State) -> None:
    for group, allocator in enumerate(state.allocators):
        inverse = {block: name for name, block in allocator.block_of.items()}
        _require(inverse == allocator.name_of, "names and blocks differ", group)
        for block in allocator.name_of:
            if allocator.owners[block] == 0:
                chunk = block // allocator.blocks_per_chunk
                is_kept = block in allocator.cached or chunk in state.pool.cached
                _require(is_kept, "a named block is among those without content", block)


def _require(holds: object, what: str, found: object) -> None:
    if not holds:
        raise InvariantError(f"{what}: {found}")
