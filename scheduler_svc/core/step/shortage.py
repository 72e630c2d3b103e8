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
room, else it is computed again. Where the worker copies beside the forward, an offloaded one's
blocks are not free at once: they count as coming, as above.
"""

from __future__ import annotations

import numpy as np

from protos.plan import Int32
from scheduler_svc.core.memory.counts import Counts
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import State
from scheduler_svc.core.step.batch import Batch


def relieve(batch: Batch) -> None:
    """Preempts the fewest victims for the stalled rows, which then join as far as they fit."""
    if not batch.stalled:
        return
    state = batch.state
    stalled, batch.stalled = batch.stalled, []
    had_victims = bool(batch.victims)
    chosen = _cover(batch, stalled)
    batch.preempt(chosen)
    gone = {request.ticket for request in chosen}
    for row in stalled:
        tenant = state.rows.running.get(row)
        if tenant is not None and tenant.ticket not in gone:
            num_tokens = state.rows.known[row] + state.rows.outstanding[row]
            batch.add_row(row, int(num_tokens - state.rows.computed[row]))
    is_stuck = batch.is_empty and not chosen and not state.in_flight and not had_victims
    if is_stuck and len(active := batch.active) == 1:  # else a wedge, the caller's business
        batch.preempt(active)


def quarantined(state: State) -> list[list[Int32]]:
    """Block tables [G] that come free with a result."""
    return [tables for step in state.in_flight for _, tables in step.transfers.quarantined]


def coming(state: State) -> tuple[Counts, list[int]]:
    """What is free once the results of what is in flight are back, and the rows that are sure to
    have ended by then."""
    later = state.memory.counts.copy()
    for tables in quarantined(state):
        give(later, tables)
    in_use = state.rows.in_use()
    ending = in_use[state.rows.is_ending(in_use)].tolist()
    for row in ending:
        give(later, state.memory.tables.of_row(row))
    return later, ending


def give(later: Counts, tables: list[Int32]) -> None:
    for group, blocks in enumerate(tables):
        later.give(group, blocks)


def _cover(batch: Batch, stalled: list[int]) -> list[Request]:
    """The fewest victims whose blocks, with what is coming, are enough for the stalled rows."""
    state = batch.state
    needs = {row: _need(state, row) for row in stalled}
    later, ending = coming(state)
    spared = batch.scheduled().union(ending)
    chosen: list[Request] = []
    active = batch.active
    for request in sorted(active, key=state.policy.urgency, reverse=True):
        total = [sum(blocks) for blocks in zip(*needs.values(), strict=True)]
        if not needs or later.fits(total) or len(chosen) == len(active) - 1:
            break
        if request.row in spared:
            continue
        give(later, state.memory.tables.of_row(request.row))
        needs.pop(request.row, None)
        chosen.append(request)
    return chosen


def _need(state: State, row: int) -> list[int]:
    """Blocks of each group for the row's next token, a copy of a shared tail included."""
    rows, computed = np.array([row], np.int32), state.rows.computed[[row]]
    needed = state.memory.blocks_needed(rows, computed + np.int32(1))
    return [int(n) for n in (needed + state.memory.shared_tails(rows, computed))[:, 0]]
