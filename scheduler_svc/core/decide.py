"""Chooses what the next step computes. Reads the state, changes nothing, returns a value.

One rule instead of phases: a step schedules `num_tokens - num_computed_tokens` tokens of a
request, cut by the budgets, where num_tokens counts the samples still outstanding. Prefill,
chunked prefill, decode, a prefix hit, resuming after a preemption are the same case; only the
order of the candidates differs (policies.py).

Three budgets bound a step: tokens, requests and pages read. Memory is taken all or nothing over
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
from scheduler_svc.core.request import Request, Swapped
from scheduler_svc.core.shortage import by_kind, choose_victims, relieve
from scheduler_svc.core.state import State
from scheduler_svc.core.static_batches import fill_static_batch
from scheduler_svc.core.suspects import Cell

LOOK_AHEAD: Final = 4  # waiting requests looked at per step, times the number of rows


def decide(state: State) -> Decision:
    """The next step, given everything the state says; the same state gives the same decision."""
    for cell in state.suspects.turns():
        decision = _decide_for(state, cell)
        if not decision.is_empty:
            break
    return decision


def _decide_for(state: State, cell: Cell | None) -> Decision:
    """A step that computes only this cell's requests (suspects.py), or anybody's."""
    batch = Batch(state)
    victims = choose_victims(state, batch.room)
    spared = candidates(state, {request.row for request in victims})
    if cell is not None:
        running, cell_of = state.rows.running, state.suspects.cell_of
        spared = spared[[cell_of(running[row]) is cell for row in spared.tolist()]]
    decodes = state.rows.is_decoding[spared]
    has_margin = batch.room.free_share() >= state.limits.safety_margin
    if state.policy.holds_finished:
        fill_static_batch(state, batch)
    for phase in state.policy.phases:
        if phase is Phase.DECODING:
            batch.add_decoding(spared[decodes])
        elif phase is Phase.PREFILLING:
            _add_prefilling(state, batch, spared[~decodes], has_margin)
        elif not batch.stalled and not batch.is_over_budget:  # first those that run
            _add_pending(state, batch, has_margin, cell)
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


def _add_prefilling(state: State, batch: Batch, rows: Int32, has_margin: bool) -> None:
    for row in rows.tolist():
        if not has_margin and not batch.is_empty:
            return
        batch.add_row(row, int(state.rows.known[row] - state.rows.computed[row]))


def _add_pending(state: State, batch: Batch, has_margin: bool, cell: Cell | None) -> None:
    new_rows = state.rows.next_free(state.rows.num_free)
    used, looked_at = 0, 0
    promised: set[Name] = set()  # by those that this step admits
    for request in state.pending.in_order():
        looked_at += 1
        rows = tuple(new_rows[used : used + 1 + len(request.siblings)])
        if looked_at > LOOK_AHEAD * state.rows.num_rows or len(rows) <= len(request.siblings):
            return
        if not has_margin and not batch.is_empty:
            return
        if request.num_in_flight:
            return  # preempted while a plan names it: a token may still come back
        if cell is not None and state.suspects.cell_of(request) is not cell:
            return  # its turn comes; to overtake it could starve it
        admission = _admission(state, request, rows, promised)
        if admission is None:
            continue  # somebody is computing what it needs next
        wanted = len(request.token_ids) - admission.num_computed
        if not batch.admit(admission, wanted):
            return  # whoever waits behind must not overtake: it could starve this one
        used += len(rows)
        if state.limits.allow_block_sharing and admission.swapped is None:
            pages = admission.num_computed // state.geometry.page_size
            promised.update(state.prefix_cache.to_promise(request, pages))


def _admission(
    state: State, request: Request, rows: tuple[int, ...], promised: set[Name]
) -> Admission | None:
    """What the request begins with; None while its next block is promised by another."""
    if request.swapped is not None:
        return _restored(state, request, rows, request.swapped)
    groups = len(state.allocators)
    if not state.limits.allow_block_sharing or not request.may_match:
        nothing = np.zeros(0, np.int32)
        return Admission(request, rows, 0, (0,) * groups, (nothing,) * groups)
    if request.awaited is not None and state.prefix_cache.is_awaited(request.awaited):
        return None  # as when it was looked at last
    hit = state.prefix_cache.match(request)
    if state.prefix_cache.is_promised(request, hit, promised):
        return None
    return Admission(request, rows, hit.num_tokens, hit.first_pages, hit.blocks)


def _restored(state: State, request: Request, rows: tuple[int, ...], swapped: Swapped) -> Admission:
    """Blocks that the prefix cache still has are shared, the others come from the swap pool."""
    tables = []
    for allocator, first, blocks in zip(
        state.allocators, swapped.first_pages, swapped.blocks, strict=True
    ):
        full = swapped.num_tokens // state.geometry.page_size  # a page filled in part is its own
        names = request.names[first:full]
        found = [allocator.block_of.get(name, -1) for name in names]
        if not state.limits.allow_block_sharing:
            found = []
        tables.append(np.array(found + [-1] * (len(blocks) - len(found)), np.int32))
    return Admission(request, rows, swapped.num_tokens, swapped.first_pages, tuple(tables), swapped)
