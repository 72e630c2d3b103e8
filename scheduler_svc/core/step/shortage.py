"""Which requests are preempted when running rows stall for want of KV memory.

The fewest victims that cover the need, newest first (least urgent first under the priority policy,
which has more reasons to preempt: overtaking.py), the beams of a search together; never a row that
the step already computes, and never the last active request, so the oldest always proceeds and
nothing can wedge. If the blocks that the plans in flight are about to release suffice, the stalled
rows wait for those instead: of
requests that have ended or are about to end by length, and of victims whose blocks the worker
copies to the swap pool beside the forward. If the last active request itself stalls, its blocks and
those of other groups fragment each other's chunks: it is preempted once and readmitted without the
prefix cache, which makes its blocks contiguous.
"""

from __future__ import annotations

import numpy as np

from protos.plan import Int32
from scheduler_svc.core.beams import units
from scheduler_svc.core.memory.counts import Counts
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import State
from scheduler_svc.core.step.batch import Batch


def relieve(batch: Batch) -> None:
    """Preempts the fewest victims for the stalled rows; the rest of these try once more."""
    if not batch.stalled:
        return
    rows = batch.state.rows
    stalled, batch.stalled = batch.stalled, []
    had_victims = bool(batch.victims)
    victims = _fewest_victims(batch, stalled)
    batch.preempt(victims)
    for row in stalled:
        if row in rows.running:  # not a victim itself
            num_tokens = rows.known[row] + rows.outstanding[row]
            batch.add_row(row, int(num_tokens - rows.computed[row]))
    is_stuck = batch.is_empty and not (victims or had_victims or batch.state.in_flight)
    if is_stuck and len(units(active := batch.active)) == 1:  # else a wedge: see wedge.py
        batch.preempt(active)


def quarantined(state: State) -> list[list[Int32]]:
    """Block tables [G] that the results of plans in flight will free."""
    return [tables for step in state.in_flight for _, tables in step.transfers.quarantined]


def counts_after_results(state: State) -> tuple[Counts, list[int]]:
    """The counts once the plans in flight have returned, and the rows sure to have ended then."""
    counts = state.memory.counts.copy()
    in_use = state.rows.in_use()
    ending = in_use[state.rows.is_ending(in_use)].tolist()
    for tables in quarantined(state) + [state.memory.tables.of_row(row) for row in ending]:
        counts.give_tables(tables)
    return counts, ending


def _fewest_victims(batch: Batch, stalled: list[int]) -> list[Request]:
    """The fewest whose blocks, with those about to be released, suffice for the stalled rows."""
    state = batch.state
    needs = {row: _need(state, row) for row in stalled}
    counts, ending = counts_after_results(state)
    spared = batch.scheduled().union(ending)
    victims: list[Request] = []
    candidates = units(sorted(batch.active, key=state.policy.urgency, reverse=True))
    num_left = len(candidates)
    for unit in candidates:
        total = [sum(blocks) for blocks in zip(*needs.values(), strict=True)]
        if not needs or counts.fits(total) or num_left == 1:
            break
        if any(request.row in spared for request in unit):
            continue
        for request in unit:
            counts.give_tables(state.memory.tables.of_row(request.row))
            needs.pop(request.row, None)
        victims += unit
        num_left -= 1
    return victims


def _need(state: State, row: int) -> list[int]:
    """Blocks [G] for the row's next token, with a copy of a shared tail."""
    rows, computed = np.array([row], np.int32), state.rows.computed[[row]]
    needed = state.memory.blocks_needed(rows, computed + np.int32(1))
    return [int(n) for n in (needed + state.memory.shared_tails(rows, computed))[:, 0]]
