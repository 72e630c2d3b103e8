"""Offers rows a place in a step, in the policy's order (policies.py).

Running rows that the cache budget leaves out take turns: they come first in the next step. Below
the safety margin decodes proceed and new prefills wait; the first candidate of an empty batch is
always let through, so nothing can wedge.
"""

from __future__ import annotations

import numpy as np

from protos.plan import Int32
from scheduler_svc.core.policies import Phase
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import State
from scheduler_svc.core.step.batch import Batch
from scheduler_svc.core.step.newcomers import admit_waiting
from scheduler_svc.core.step.overtaking import overtakes
from scheduler_svc.core.step_time import PromptTime


def fill_by_phase(batch: Batch) -> None:
    """Adds decoding, prefilling and pending requests to the batch, phase by phase."""
    state, favoured = batch.state, batch.favoured
    running = candidates(state)
    if batch.cell is not None:
        cell_of, tenants = state.suspects.cell_of, state.rows.running
        running = running[[cell_of(tenants[row]) is batch.cell for row in running.tolist()]]
    is_decoding = state.rows.is_decoding[running]
    if state.step_cost.aim and (len(state.pending) or not is_decoding.all()):
        ends = state.rows.computed[running[is_decoding]] + np.int32(1)
        batch.prompt_time = PromptTime(state.step_cost, ends)
    phases = state.policy.phases
    if state.left_out:
        _add_in_turn(batch, running)
        phases = (Phase.PENDING,)
    for phase in phases:
        if phase is Phase.DECODING:
            batch.add_decoding(running[is_decoding])
        elif phase is Phase.PREFILLING:
            _add_prefilling(batch, running[~is_decoding])
        else:
            if favoured is not None:
                admit_waiting(batch, [favoured])
            admit_waiting(batch, state.pending.in_order())


def candidates(state: State) -> Int32:
    """Running rows [R] with tokens to compute, in the policy's order within a phase."""
    rows = state.rows
    order = rows.in_use()
    if state.policy.by_priority:
        urgency = [state.policy.urgency(request) for request in rows.running.values()]
        order = order[np.argsort(urgency, kind="stable")]
    chosen: Int32 = order[rows.to_compute(order) > 0]
    return chosen


def _add_in_turn(batch: Batch, running: Int32) -> None:
    """Adds running rows one by one, first those that the last step left out."""
    rows, policy = batch.state.rows, batch.state.policy
    turns = {request.row: turn for turn, request in enumerate(batch.state.left_out)}

    def order(row: int) -> tuple[int, int, int]:
        priority = rows.running[row].priority if policy.by_priority else 0
        phase = Phase.DECODING if rows.is_decoding[row] else Phase.PREFILLING
        return priority, turns.get(row, len(turns)), policy.phases.index(phase)

    decodes_left = int(rows.is_decoding[running].sum())
    for row in sorted(running.tolist(), key=order):
        if rows.is_decoding[row]:
            batch.add_row(row, 1)
            decodes_left -= 1
        elif _may_join(batch, rows.running[row]):
            wanted = int(rows.known[row] - rows.computed[row])
            batch.add_row(row, min(wanted, max(1, batch.tokens_left - decodes_left)))


def _add_prefilling(batch: Batch, prefilling: Int32) -> None:
    rows, favoured = batch.state.rows, batch.favoured
    for row in prefilling.tolist():
        request = rows.running[row]
        if favoured is not None and overtakes(batch.state, favoured, request):
            admit_waiting(batch, [favoured])
            favoured = None
        if not _may_join(batch, request):
            return
        batch.add_row(row, int(rows.known[row] - rows.computed[row]))


def _may_join(batch: Batch, request: Request) -> bool:
    """Whether the margin lets the request take blocks for its prompt."""
    if batch.is_empty or batch.has_margin():
        return True
    state = batch.state
    return state.policy.by_priority and any(
        overtakes(state, request, other) for other in batch.active_before
    )
