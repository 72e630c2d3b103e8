"""Chooses what the next step computes. Reads the state, changes nothing, returns a value.

One rule instead of phases: a step schedules `num_tokens - num_computed_tokens` tokens of a
request, cut by the budgets, where num_tokens counts the samples still outstanding. Prefill,
chunked prefill, decode, a prefix hit, resuming after a preemption are the same case; only the
order of the candidates differs (policies.py).

Three budgets bound a step: tokens, requests and pages read. Running rows for which the pages do
not suffice take turns: who was left out comes first in the next step. Memory is all or nothing over
the cache groups. A running request that finds none is stalled; shortage.py decides who makes room
for it. Below the safety margin new prefills wait and decodes go on; the first candidate of an
otherwise empty batch is always let through, so nothing can wedge.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from protos.plan import Int32
from scheduler_svc.core.allocators import Name
from scheduler_svc.core.batch import Admission, Batch, Decision
from scheduler_svc.core.policies import Phase
from scheduler_svc.core.request import Request
from scheduler_svc.core.shortage import by_kind, choose_victims, relieve
from scheduler_svc.core.state import State
from scheduler_svc.core.static_batches import fill_static_batch

LOOK_AHEAD: Final = 4  # waiting requests looked at per step, times the number of rows


def decide(state: State) -> Decision:
    """The next step, given everything the state says; the same state gives the same decision."""
    batch = Batch(state)
    victims = choose_victims(state, batch.room)
    spared = candidates(state, {request.row for request in victims})
    decodes = state.rows.is_decoding[spared]
    has_margin = batch.room.free_share() >= state.limits.safety_margin
    if state.policy.holds_finished:
        fill_static_batch(state, batch)
    phases = state.policy.phases
    if state.left_out:
        _add_in_turn(state, batch, spared, has_margin)
        phases = (Phase.PENDING,)
    for phase in phases:
        if phase is Phase.DECODING:
            batch.add_decoding(spared[decodes])
        elif phase is Phase.PREFILLING:
            _add_prefilling(state, batch, spared[~decodes], has_margin)
        elif not batch.stalled and not batch.left_out:  # first those that run
            _add_pending(state, batch, has_margin)
    victims += relieve(state, batch, victims)
    return batch.decision(*by_kind(state, victims))


def candidates(state: State, without: set[int]) -> Int32:
    """Running rows that may compute something: not ended, and not sure to end by length."""
    rows = state.rows
    order = rows.order()
    if state.policy.by_priority:
        urgency = [state.policy.urgency(request) for request in rows.running.values()]
        order = order[np.argsort(urgency, kind="stable")]
    chosen: Int32 = order[rows.goes_on(order)]
    if without:
        chosen = chosen[[row not in without for row in chosen.tolist()]]
    return chosen


def _add_in_turn(state: State, batch: Batch, rows: Int32, has_margin: bool) -> None:
    """Running rows one by one, those first that the last step left out."""
    table, policy = state.rows, state.policy
    waits = {request.row: place for place, request in enumerate(state.left_out)}
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
        elif has_margin or batch.is_empty:
            wanted = int(table.known[row] - table.computed[row])
            batch.add_row(row, min(wanted, max(1, batch.tokens_left - decodes_left)))


def _add_prefilling(state: State, batch: Batch, rows: Int32, has_margin: bool) -> None:
    for row in rows.tolist():
        if not has_margin and not batch.is_empty:
            return
        batch.add_row(row, int(state.rows.known[row] - state.rows.computed[row]))


def _add_pending(state: State, batch: Batch, has_margin: bool) -> None:
    new_rows = state.rows.next_free(state.rows.num_free)
    used, looked_at = 0, 0
    promised: set[Name] = set()  # by those that this step admits
    for request in state.pending.in_order():
        if not (batch.tokens_left and batch.requests_left):
            return
        looked_at += 1
        rows = tuple(new_rows[used : used + 1 + len(request.siblings)])
        if looked_at > LOOK_AHEAD * state.rows.num_rows or len(rows) <= len(request.siblings):
            return
        if not has_margin and not batch.is_empty:
            return
        if request.num_in_flight:
            return  # preempted while a plan names it: a token may still come back
        admission = _admission(state, request, rows, promised)
        if admission is None:
            continue  # somebody is computing what it needs next
        is_admitted = batch.admit(admission, len(request.token_ids) - admission.num_computed)
        if not is_admitted and batch.is_empty and not state.rows.running:
            # alone it always fits, but for cached blocks that lie scattered over too many chunks
            admission = _alone(state, request, rows)
            is_admitted = batch.admit(admission, len(request.token_ids) - admission.num_computed)
        if not is_admitted:
            return  # whoever waits behind must not overtake: it could starve this one
        used += len(rows)
        if state.limits.allow_block_sharing and admission.swapped is None:
            pages = admission.num_computed // state.geometry.page_size
            promised.update(state.prefix_cache.to_promise(request, pages))


def _admission(
    state: State, request: Request, rows: tuple[int, ...], promised: set[Name]
) -> Admission | None:
    """What the request begins with; None while its next block is promised by another."""
    if not state.limits.allow_block_sharing or not request.may_match:
        return _alone(state, request, rows)
    swapped = request.swapped
    if swapped is not None:  # what the prefix cache has no more comes from the swap pool
        tables = state.prefix_cache.find(request, swapped)
        return Admission(request, rows, swapped.num_tokens, swapped.first_pages, tables, swapped)
    hit = state.prefix_cache.match(request, promised)
    if hit is None:
        return None
    num_computed = hit.num_pages * state.geometry.page_size
    return Admission(request, rows, num_computed, hit.first_pages, hit.blocks)


def _alone(state: State, request: Request, rows: tuple[int, ...]) -> Admission:
    """What it begins with when it shares nothing."""
    if request.swapped is None:
        groups, nothing = len(state.allocators), np.zeros(0, np.int32)
        return Admission(request, rows, 0, (0,) * groups, (nothing,) * groups)
    swapped = request.swapped
    tables = tuple(np.full(len(blocks), -1, np.int32) for blocks in swapped.blocks)
    return Admission(request, rows, swapped.num_tokens, swapped.first_pages, tables, swapped)
