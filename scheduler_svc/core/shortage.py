"""Who makes room when KV memory is short, and for whom.

Running requests that stall: the fewest victims that cover the need, newest first (least urgent
first under the priority policy); never one that the step already computes, never the last active
one, so the oldest always gets on and nothing can wedge. What requests give back that have ended,
or end by length, when their plans return counts as coming: then everybody waits for it. If the
last active request itself stalls, its blocks and those of the other groups block each other inside
chunks: it is reset once, without the prefix cache, which puts its blocks side by side.

Under the priority policy there are two more reasons, one victim a step: a more urgent request
waits while rows or blocks are over 90 % in use; and fewer than 10 % of the blocks are free while
the least urgent running request is less urgent than another.

A victim keeps its tokens and waits in its old place; its KV goes to the swap pool if that has
room (`by_kind`), else it is computed again. Where the worker copies beside the forward, an
offloaded one's blocks are not free at once: they count as coming, as above.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from protos.plan import Int32
from scheduler_svc.core.batch import Batch, blocks_needed
from scheduler_svc.core.request import Request, RequestState
from scheduler_svc.core.room import Room
from scheduler_svc.core.state import State

FULL_SHARE: Final = 0.9  # of rows or blocks in use: the more urgent preempt
LOW_SHARE: Final = 0.1  # of blocks free: the least urgent is swapped out


def choose_victims(state: State, room: Room) -> list[Request]:
    """Whom the priority policy preempts before the step is planned; counted into `room`."""
    if not state.policy.by_priority:
        return []
    active = _active(state)
    if len(active) < 2 or _quarantined(state):
        return []
    victim = max(active, key=lambda r: (r.priority, -r.num_output_tokens, r.ticket))
    urgency = state.policy.urgency
    most_urgent = min(request.priority for request in active)
    waiting = next(state.pending.in_order(), None)
    used_rows = len(state.rows.running) / state.rows.num_rows
    free = room.free_share()
    is_full = used_rows > FULL_SHARE or 1 - free > FULL_SHARE
    # by urgency too: one that has aged its way to the front stays there
    is_overtaken = (
        waiting is not None
        and waiting.priority < victim.priority
        and urgency(waiting) < urgency(victim)
    )
    is_low = free < LOW_SHARE and most_urgent < victim.priority
    if not (is_full and is_overtaken) and not is_low:
        return []
    for request in _free_at_once(state, [victim]):
        room.give_row(state.rows, request.row)
    return [victim]


def relieve(state: State, batch: Batch, victims: list[Request]) -> list[Request]:
    """Further victims for the stalled rows, which then join the batch as far as they fit."""
    if not batch.stalled:
        return []
    needs = {row: _need(state, row) for row in batch.stalled}
    spared = batch.scheduled() | {request.row for request in victims}
    chosen = _cover(state, batch.room, needs, spared, len(victims))
    for request in _free_at_once(state, victims + chosen):
        if request not in victims:
            batch.room.give_row(state.rows, request.row)
    reset = {request.row for request in chosen}
    stalled, batch.stalled = batch.stalled, []
    for row in stalled:
        if row not in reset:
            num_tokens = state.rows.known[row] + state.rows.outstanding[row]
            batch.add_row(row, int(num_tokens - state.rows.computed[row]))
    if batch.is_empty and not chosen and not state.in_flight and not victims:
        active = _active(state)
        return active if len(active) == 1 else []  # else a wedge, which is the caller's business
    return chosen


def by_kind(state: State, victims: list[Request]) -> tuple[list[Request], list[Request]]:
    """Splits victims into those to soft-reset and those that the swap pool has room for."""
    soft_resets, offloads = [], []
    free = [allocator.num_free for allocator in state.swap_allocators]
    chunks = state.swap_pool.num_free
    for request in victims:
        needs = [len(state.rows.blocks_of(group, request.row)) for group in range(len(free))]
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


def _free_at_once(state: State, victims: list[Request]) -> list[Request]:
    """Those of the victims whose blocks this step may have already."""
    soft_resets, offloads = by_kind(state, victims)
    return soft_resets if state.geometry.overlaps_swap else soft_resets + offloads


def _quarantined(state: State) -> list[list[Int32]]:
    """Block tables [G] that come free with a result."""
    return [tables for step in state.in_flight for _, tables in step.transfers.quarantined]


def _cover(
    state: State, room: Room, needs: dict[int, list[int]], spared: set[int], gone: int
) -> list[Request]:
    coming = room.copy()
    for tables in _quarantined(state):
        for group, blocks in enumerate(tables):
            coming.give(group, blocks)
    order = state.rows.order()
    ending = order[~state.rows.goes_on(order)].tolist()
    for row in ending:
        coming.give_row(state.rows, row)
    spared = spared.union(ending)
    active = _active(state)
    chosen: list[Request] = []
    for request in sorted(active, key=state.policy.urgency, reverse=True):
        total = [sum(blocks) for blocks in zip(*needs.values(), strict=True)]
        if not needs or coming.fits(total) or len(chosen) + gone == len(active) - 1:
            break
        if request.row in spared:
            continue
        coming.give_row(state.rows, request.row)
        needs.pop(request.row, None)
        chosen.append(request)
    return chosen


def _need(state: State, row: int) -> list[int]:
    """Blocks of each group for the row's next token, a copy of a shared tail included."""
    needed, _ = blocks_needed(state, np.array([row], np.int32), np.array([1], np.int32))
    computed = int(state.rows.computed[row])
    for group, allocator in enumerate(state.allocators):
        if computed % state.geometry.page_size:
            tail = state.rows.tail_block(group, row, state.geometry.page_size)
            needed[group, 0] += int(allocator.owners[tail] > 1)
    return [int(blocks) for blocks in needed[:, 0]]


def _active(state: State) -> list[Request]:
    """Running requests that have not ended, without siblings that are not forked off yet."""
    return [
        request
        for row, request in state.rows.running.items()
        if request.state is not RequestState.FINISHED and not state.rows.awaits_fork[row]
    ]
