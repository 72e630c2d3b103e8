"""Chooses what the next step computes. Reads the state, changes nothing, returns a value.

One rule instead of phases: a step schedules `num_tokens - num_computed_tokens` tokens of a
request, cut by the budgets, where num_tokens counts the samples still outstanding. Prefill,
chunked prefill, decode, a prefix hit, resuming after a preemption are the same case; only the
order of the candidates differs (policies.py).

Three budgets bound a step: tokens, requests and pages read; and its prompts are cut so that it
takes about the time that it aims at (step_time.py). Running rows for which the pages do not
suffice take turns: who was left out comes first in the next step. Memory is all or nothing over
the cache groups. A running request that finds none is stalled; shortage.py decides who makes room
for it. Below the safety margin new prefills wait and decodes go on; the first candidate of an
otherwise empty batch is always let through, so nothing can wedge.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Final

import numpy as np

from protos.plan import Int32
from scheduler_svc.core.allocators import Name
from scheduler_svc.core.batch import Admission, Batch, Decision
from scheduler_svc.core.head_start import admission, alone
from scheduler_svc.core.overtaking import choose_victims, overtakes, stays
from scheduler_svc.core.policies import Phase
from scheduler_svc.core.request import Request
from scheduler_svc.core.shortage import active_requests, by_kind, relieve
from scheduler_svc.core.state import State
from scheduler_svc.core.static_batches import fill_static_batch
from scheduler_svc.core.step_time import PromptTime
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
    victims, favoured = choose_victims(state, batch.room)
    if cell is not None and favoured is not None and state.suspects.cell_of(favoured) is not cell:
        batch, victims, favoured = Batch(state), [], None  # room is made for it when it is its turn
    spared = candidates(state, {request.row for request in victims})
    if cell is not None:
        running, cell_of = state.rows.running, state.suspects.cell_of
        spared = spared[[cell_of(running[row]) is cell for row in spared.tolist()]]
    decodes = state.rows.is_decoding[spared]
    newcomers = Newcomers(state, batch, favoured, victims, cell)
    if state.policy.holds_finished:
        fill_static_batch(state, batch)
    elif state.step_cost.aim and (len(state.pending) or not decodes.all()):
        decoding = state.rows.computed[spared[decodes]] + np.int32(1)
        batch.prompt_time = PromptTime(state.step_cost, decoding)
    phases = state.policy.phases
    if state.left_out:
        _add_in_turn(state, batch, spared)
        phases = (Phase.PENDING,)
    for phase in phases:
        if phase is Phase.DECODING:
            batch.add_decoding(spared[decodes])
        elif phase is Phase.PREFILLING:
            _add_prefilling(state, batch, spared[~decodes], newcomers)
        else:
            if favoured is not None:
                newcomers.add([favoured])
            newcomers.add(state.pending.in_order())
    victims += relieve(state, batch, victims)
    decision = batch.decision(*by_kind(state, victims))
    if cell is not None:  # those of other cells still wait for their turns
        others = (r for r in state.left_out if state.suspects.cell_of(r) is not cell)
        decision = replace(decision, left_out=(*decision.left_out, *others))
    return decision


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


def _add_in_turn(state: State, batch: Batch, rows: Int32) -> None:
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
        elif may_join(state, batch, table.running[row]):
            wanted = int(table.known[row] - table.computed[row])
            batch.add_row(row, min(wanted, max(1, batch.tokens_left - decodes_left)))


def _add_prefilling(state: State, batch: Batch, rows: Int32, newcomers: Newcomers) -> None:
    favoured = newcomers.favoured
    for row in rows.tolist():
        request = state.rows.running[row]
        if favoured is not None and overtakes(state, favoured, request):
            newcomers.add([favoured])
            favoured = None
        if not may_join(state, batch, request):
            return
        batch.add_row(row, int(state.rows.known[row] - state.rows.computed[row]))


def may_join(state: State, batch: Batch, request: Request) -> bool:
    """Whether the margin lets the request have memory for a prompt."""
    if batch.is_empty or batch.has_margin():
        return True
    return state.policy.by_priority and any(
        overtakes(state, request, other) for other in active_requests(state)
    )


class Newcomers:
    """Admits waiting requests to a batch."""

    def __init__(
        self,
        state: State,
        batch: Batch,
        favoured: Request | None,
        victims: list[Request],
        cell: Cell | None,
    ) -> None:
        """The favoured one joins whatever the margin; the victims' rows are free for it."""
        self.favoured = favoured
        self._cell = cell
        self._state = state
        self._batch = batch
        self._rows = state.rows.next_free(state.rows.num_free)
        self._rows += [request.row for request in victims]
        self._promised: set[Name] = set()  # by those that this step admits
        self._admitted: set[int] = set()  # tickets

    def add(self, requests: Iterable[Request]) -> None:
        """As many of them as there is room for, in this order."""
        state, batch = self._state, self._batch
        if batch.stalled or batch.left_out or not len(state.pending):
            return  # first those that run
        has_margin = batch.has_margin()
        for request in islice(requests, LOOK_AHEAD * state.rows.num_rows):
            rows = tuple(self._rows[: 1 + len(request.siblings)])
            if not (batch.tokens_left and batch.requests_left) or len(rows) <= len(
                request.siblings
            ):
                return
            if request.ticket in self._admitted:
                continue
            is_free = batch.is_empty or request is self.favoured
            if not (has_margin or is_free):
                return
            if request.num_in_flight:
                return  # preempted while a plan names it: a token may still come back
            if self._cell not in (None, state.suspects.cell_of(request)):
                return  # its turn comes; to overtake it could starve it
            begins = admission(state, request, rows, self._promised)
            if begins is None:
                continue  # somebody is computing what it needs next
            if not (is_free or stays(state, batch.room, begins)) or not self._admit(begins):
                return  # whoever waits behind must not overtake: it could starve this one
            has_margin = batch.has_margin()

    def _admit(self, begins: Admission) -> bool:
        state, batch, request = self._state, self._batch, begins.request
        num_tokens = len(request.token_ids)
        is_admitted = batch.admit(begins, num_tokens - begins.num_computed)
        if not is_admitted and batch.is_empty and not state.rows.running:
            # alone it always fits, but for cached blocks that lie scattered over too many chunks
            begins = alone(state, request, begins.rows)
            is_admitted = batch.admit(begins, num_tokens - begins.num_computed)
        if is_admitted:
            del self._rows[: len(begins.rows)]
            self._admitted.add(request.ticket)
            if state.limits.allow_block_sharing and begins.swapped is None:
                pages = begins.num_computed // state.geometry.page_size
                self._promised.update(state.prefix_cache.to_promise(request, pages))
        return is_admitted
