"""The invariants of the state. A violation is a bug of ours: it crashes with what was found.

`check_rows` looks at the rows a step touched, at a cost that does not grow with the pool;
`check` looks at everything.
"""

from __future__ import annotations

import numpy as np

from protos.plan import NUM_RESERVED_CHUNKS, Int32
from scheduler_svc.core.request import NO_ROW, RequestState
from scheduler_svc.core.state import State


class InvariantError(AssertionError):
    """The state contradicts itself."""


def check_rows(state: State, touched: Int32) -> None:
    """The cursors and table lengths of the touched rows, and the count of owned blocks."""
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
    for group, allocator in enumerate(state.allocators):
        _require(
            (rows.table_len[group, touched] == allocator.blocks_for(computed)).all(),
            "a block table is not ceil(tokens / page_size) long",
            touched,
        )
        owned = int(rows.table_len[group, rows.order()].sum())
        _require(
            owned == allocator.num_owned,
            "owned blocks that stand in no table",
            (owned, allocator.num_owned),
        )


def check(state: State) -> None:
    """Everything: each chunk and block accounted for, each request in exactly one place."""
    rows = state.rows
    check_rows(state, rows.order())
    _check_memory(state)
    finished_rows = 0
    for row, request in rows.running.items():
        _require(request.row == row, "a row's tenant does not know it", request)
        if request.state is RequestState.FINISHED:
            finished_rows += 1
            _require(rows.num_in_flight[row] > 0, "an ended request holds its row", request)
        else:
            _require(
                state.requests.get(request.request_id) is request,
                "a running request is not live",
                request,
            )
        _require(
            rows.known[row] == len(request.token_ids) or request.state is RequestState.FINISHED,
            "known differs from token_ids",
            request,
        )
    _require(len(rows.running) + rows.num_free == rows.num_rows, "rows are lost", rows.num_free)
    waiting = [request for request in state.requests.values() if request.row == NO_ROW]
    for request in waiting:
        _require(
            request.state is RequestState.PENDING and request in state.pending,
            "a request without a row is not waiting",
            request,
        )
    _require(len(state.pending) == len(waiting), "the queue holds others", len(state.pending))
    order = [request.ticket for request in state.pending.in_order()]
    _require(order == sorted(order), "the queue is out of order", order)


def _check_memory(state: State) -> None:
    held: list[int] = list(state.pool.free)
    for group, allocator in enumerate(state.allocators):
        chunks = allocator.held_chunks()
        held += chunks
        named = np.concatenate(
            [state.rows.blocks_of(group, row) for row in state.rows.running]
            or [np.zeros(0, np.int32)]
        )
        owners = np.bincount(named, minlength=len(allocator.owners))
        _require((owners == allocator.owners).all(), "owners differ from the block tables", group)
        free = allocator.free_blocks()
        mine = np.zeros(len(allocator.owners), np.int32)
        mine[free] += 1
        mine[np.flatnonzero(owners)] += 1
        expected = np.zeros_like(mine)
        for chunk in chunks:
            first = chunk * allocator.blocks_per_chunk
            expected[first : first + allocator.blocks_per_chunk] = 1
        _require((mine == expected).all(), "a block is neither free nor owned, or both", group)
    every = list(range(NUM_RESERVED_CHUNKS, state.pool.num_chunks))
    _require(sorted(held) == every, "chunks are lost or held twice", sorted(held))


def _require(holds: object, what: str, found: object) -> None:
    if not holds:
        raise InvariantError(f"{what}: {found}")
