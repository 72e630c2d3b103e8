"""Who makes room when KV memory is short, and for whom.

Running requests that stall: the fewest victims that cover the need, newest first (least urgent
first under the priority policy); never one that the step already computes, never the last active
one, so the oldest always gets on and nothing can wedge. What requests give back that have ended,
or end by length, when their plans return counts as coming: then everybody waits for it. If the
last active request itself stalls, its blocks and those of the other groups block each other inside
chunks: it is preempted once and comes back without the prefix cache, which puts its blocks side
by side.

Under the priority policy there are more reasons: overtaking.py.

A victim keeps its tokens and waits in its old place; its KV goes to the swap pool if that has
room (`by_kind`), else it is computed again. Where the worker copies beside the forward, an
offloaded one's blocks are not free at once: they count as coming, as above.
"""

from __future__ import annotations

import numpy as np

from protos.plan import Int32
from scheduler_svc.core.batch import Batch, blocks_needed
from scheduler_svc.core.request import Request, RequestState
from scheduler_svc.core.room import Room
from scheduler_svc.core.state import State


def relieve(state: State, batch: Batch, victims: list[Request]) -> list[Request]:
    """Further victims for the stalled rows, which then join the batch as far as they fit."""
    if not batch.stalled:
        return []
    needs = {row: _need(state, row) for row in batch.stalled}
    spared = batch.scheduled() | {request.row for request in victims}
    chosen = _cover(state, batch.room, needs, spared, len(victims))
    for request in free_at_once(state, victims + chosen):
        if request not in victims:
            batch.room.give_row(state.rows, request.row)
    reset = {request.row for request in chosen}
    stalled, batch.stalled = batch.stalled, []
    for row in stalled:
        if row not in reset:
            num_tokens = state.rows.known[row] + state.rows.outstanding[row]
            batch.add_row(row, int(num_tokens - state.rows.computed[row]))
    if batch.is_empty and not chosen and not state.in_flight and not victims:
        active = active_requests(state)
        return active if len(active) == 1 else []  # else a wedge, which is the caller's business
    return chosen


def by_kind(state: State, victims: list[Request]) -> tuple[list[Request], list[Request]]:
    """Splits victims into those to soft-reset and those that the swap pool has room for."""
    soft_resets, offloads = [], []
    free = [allocator.num_free for allocator in state.swap_allocators]
    chunks = state.swap_pool.num_free
    for request in victims:
        needs = [len(blocks) for blocks in state.window(request.row)]
        added = [
            allocator.chunks_for(need, free[group])
            for group, (allocator, need) in enumerate(
                zip(state.swap_allocators, needs, strict=True)
            )
        ]
        if sum(added) > chunks or request.siblings or not any(needs):
            soft_resets.append(request)
            continue
        offloads.append(request)
        chunks -= sum(added)
        for group, allocator in enumerate(state.swap_allocators):
            free[group] += added[group] * allocator.blocks_per_chunk - needs[group]
    return soft_resets, offloads


def free_at_once(state: State, victims: list[Request]) -> list[Request]:
    """Those of the victims whose blocks this step may have already."""
    soft_resets, offloads = by_kind(state, victims)
    return soft_resets if state.geometry.overlaps_swap else soft_resets + offloads


def quarantined(state: State) -> list[list[Int32]]:
    """Block tables [G] that come free with a result."""
    return [tables for step in state.in_flight for _, tables in step.transfers.quarantined]


def coming(state: State, room: Room) -> tuple[Room, list[int]]:
    """The room that there is once the results of what is in flight are back, and the rows that
    are sure to have ended by then."""
    later = room.copy()
    for tables in quarantined(state):
        for group, blocks in enumerate(tables):
            later.give(group, blocks)
    order = state.rows.order()
    ending = order[~state.rows.goes_on(order)].tolist()
    for row in ending:
        later.give_row(state.rows, row)
    return later, ending


def _cover(
    state: State, room: Room, needs: dict[int, list[int]], spared: set[int], gone: int
) -> list[Request]:
    later, ending = coming(state, room)
    spared = spared.union(ending)
    active = active_requests(state)
    chosen: list[Request] = []
    for request in sorted(active, key=state.policy.urgency, reverse=True):
        total = [sum(blocks) for blocks in zip(*needs.values(), strict=True)]
        if not needs or later.fits(total) or len(chosen) + gone == len(active) - 1:
            break
        if request.row in spared:
            continue
        later.give_row(state.rows, request.row)
        needs.pop(request.row, None)
        chosen.append(request)
    return chosen


def _need(state: State, row: int) -> list[int]:
    """Blocks of each group for the row's next token, a copy of a shared tail included."""
    needed = blocks_needed(state, np.array([row], np.int32), np.array([1], np.int32))
    computed = int(state.rows.computed[row])
    for group, allocator in enumerate(state.allocators):
        if computed % state.geometry.page_size:
            tail = state.rows.tail_block(group, row, state.geometry.page_size)
            needed[group, 0] += int(allocator.owners[tail] > 1)
    return [int(blocks) for blocks in needed[:, 0]]


def active_requests(state: State) -> list[Request]:
    """Running requests that have not ended, without siblings that are not forked off yet."""
    return [
        request
        for row, request in state.rows.running.items()
        if request.state is not RequestState.FINISHED and not state.rows.awaits_fork[row]
    ]
