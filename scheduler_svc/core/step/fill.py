"""Offers places in a step, in the policy's order (policies.py).

Running rows for which the pages do not suffice take turns: who was left out comes first in the
next step. Below the safety margin new prefills wait and decodes go on; the first candidate of an
otherwise empty batch is always let through, so nothing can wedge.
"""

from __future__ import annotations

import numpy as np

from protos.plan import Int32
from scheduler_svc.core.policies import Phase
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import State
from scheduler_svc.core.step.batch import Batch
from scheduler_svc.core.step.newcomers import admit_waiting
from scheduler_svc.core.step.overtaking import make_way, overtakes
from scheduler_svc.core.step_time import PromptTime


def fill_by_phase(batch: Batch) -> None:
    """Decoding, prefilling and pending requests, phase after phase."""
    state = batch.state
    favoured = make_way(batch)
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
            _add_prefilling(batch, running[~is_decoding], favoured)
        else:
            if favoured is not None:
                admit_waiting(batch, [favoured], favoured)
            admit_waiting(batch, state.pending.in_order(), favoured)


def candidates(state: State) -> Int32:
    """Running rows that have something to compute: num_tokens - num_computed_tokens > 0."""
    rows = state.rows
    order = rows.in_use()
    if state.policy.by_priority:
        urgency = [state.policy.urgency(request) for request in rows.running.values()]
        order = order[np.argsort(urgency, kind="stable")]
    chosen: Int32 = order[rows.to_compute(order) > 0]
    return chosen


def _add_in_turn(batch: Batch, rows: Int32) -> None:
    """Running rows one by one, those first that the last step left out."""
    table, policy = batch.state.rows, batch.state.policy
    waits = {request.row: place for place, request in enumerate(batch.state.left_out)}
    phase = {True: Phase.DECODING, False: Phase.PREFILLING}

    def turn(row: int) -> tuple[int, int, int]:
        priority = table.running[row].priority if policy.by_priority else 0
        is_decoding = bool(table.is_decoding[row])
        return priority, waits.get(row, len(waits)), policy.phases.index(phase[is_decoding])

    decodes_left = int(table.is_decoding[rows].sum())
    for row in sorted(rows.tolist(), key=turn):
        if table.is_decoding[row]:
            batch.add_row(row, 1)
            decodes_left -= 1
        elif _may_join(batch, table.running[row]):
            wanted = int(table.known[row] - table.computed[row])
            batch.add_row(row, min(wanted, max(1, batch.tokens_left - decodes_left)))


def _add_prefilling(batch: Batch, rows: Int32, favoured: Request | None) -> None:
    table = batch.state.rows
    for row in rows.tolist():
        request = table.running[row]
        if favoured is not None and overtakes(batch.state, favoured, request):
            admit_waiting(batch, [favoured], favoured)
            favoured = None
        if not _may_join(batch, request):
            return
        batch.add_row(row, int(table.known[row] - table.computed[row]))


def _may_join(batch: Batch, request: Request) -> bool:
    """Whether the margin lets the request have memory for a prompt."""
    if batch.is_empty or batch.has_margin():
        return True
    state = batch.state
    return state.policy.by_priority and any(overtakes(state, request, other) for other in batch.ran)
