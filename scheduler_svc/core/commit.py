"""Applies a decision to the state. It cannot fail: `decide` has counted what it takes."""

from __future__ import annotations

import numpy as np

from protos.plan import Int32
from scheduler_svc.core.decide import Decision
from scheduler_svc.core.request import RequestState
from scheduler_svc.core.state import InFlight, State


def commit(state: State, decision: Decision) -> InFlight | None:
    """What is now in flight, to be packed and sent; None when the step computes nothing."""
    for request in decision.soft_resets:
        state.soft_reset(request)
    if not len(decision.rows):
        return None
    admitted = []
    for request in decision.admissions:
        state.pending.remove(request)
        request.state = RequestState.PREFILLING
        admitted.append(state.rows.assign(request))
    rows = decision.rows
    for group in range(len(state.allocators)):
        _extend_tables(state, group, rows, decision.new_blocks[group])

    table = state.rows
    table.computed[rows] += decision.num_new_tokens
    samples = table.computed[rows] == table.known[rows] + table.outstanding[rows]
    sampling = rows[samples]
    table.outstanding[sampling] += 1
    table.is_decoding[sampling] = True
    table.num_in_flight[rows] += 1
    in_flight = InFlight(
        step_id=state.next_step_id,
        rows=rows,
        num_new_tokens=decision.num_new_tokens,
        generation=table.generation[rows],
        sampled=np.flatnonzero(samples),
        admitted=np.array(admitted, np.int32),
        requests=[table.running[row] for row in rows.tolist()],
    )
    state.next_step_id += 1
    state.in_flight.append(in_flight)
    return in_flight


def _extend_tables(state: State, group: int, rows: Int32, counts: Int32) -> None:
    """Takes counts[i] blocks for rows[i] and writes them behind its block table. [R]"""
    blocks = state.allocators[group].take(int(counts.sum()))
    grown = np.repeat(rows, counts)
    place_in_row = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)
    state.rows.table[group, grown, state.rows.table_len[group, grown] + place_in_row] = blocks
    state.rows.table_len[group, rows] += counts
