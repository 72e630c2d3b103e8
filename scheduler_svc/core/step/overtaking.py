"""The priority policy's preemptions before a step is filled.

A waiting request *overtakes* running ones that are less urgent both by priority and by urgency, so
one that aged its way to the front stays there. If it lacks rows or blocks for its whole prompt, the
fewest, least urgent of them are preempted; none if all of them would not suffice, or if blocks
about to be released do. It joins and prefills whatever the margin: else rows that decode below the
margin would keep it out until they end.

Under 10 % free blocks, the least urgent running request is preempted, one per step, if another is
more urgent. Hysteresis: the policy's margin of 20 % is wider, and a waiting request joins beside
more urgent ones only if its prompt leaves those 10 % free.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

import numpy as np

from protos.plan import Int32
from scheduler_svc.core.beams import units
from scheduler_svc.core.memory.counts import Counts
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import State
from scheduler_svc.core.step.batch import Admission, Batch
from scheduler_svc.core.step.head_start import admission
from scheduler_svc.core.step.shortage import counts_after_results, quarantined

LOW_SHARE: Final = 0.1  # of blocks free: the least urgent running request is preempted


def overtakes(state: State, request: Request, other: Request) -> bool:
    """Whether a waiting request may preempt a running one, or prefill before it."""
    urgency = state.policy.urgency
    return request.priority < other.priority and urgency(request) < urgency(other)


def make_room(batch: Batch) -> None:
    """Preempts for the first waiting request, or because few blocks are free, and sets
    `batch.favoured`. Only the priority policy does either."""
    state = batch.state
    if not state.policy.by_priority:
        return
    victims: list[Request] | None = None
    if (favoured := _first_in_line(state)) is not None:
        victims = _fewest_victims(batch, favoured)
        if victims is not None:
            if batch.cell not in (None, state.suspects.cell_of(favoured)):
                return  # its cell's turn makes room for it
            batch.favoured = favoured
    if not victims and len(batch.active_before) > 1 and not quarantined(state):
        least_urgent = max(batch.active_before, key=_expendable)
        unit = next(unit for unit in units(batch.active_before) if least_urgent in unit)
        most_urgent = min(request.priority for request in batch.active_before)
        if state.memory.counts.free_share() < LOW_SHARE and most_urgent < least_urgent.priority:
            victims = unit
    batch.preempt(victims or [])


def leaves_reserve(batch: Batch, candidate: Admission) -> bool:
    """Whether LOW_SHARE of the blocks stays free beside its whole prompt; always if no more urgent
    request runs. Else it would be preempted at once."""
    state, priority = batch.state, candidate.request.priority
    if not state.policy.by_priority or all(r.priority >= priority for r in batch.active_before):
        return True
    counts = state.memory.counts
    pairs = zip(_whole_prompt(state, candidate), counts.blocks_per_chunk, strict=True)
    chunks = sum(blocks / per_chunk for blocks, per_chunk in pairs)
    return counts.free_share() - chunks / counts.num_usable >= LOW_SHARE


def _expendable(request: Request) -> tuple[int, int, int]:
    """Higher is preempted first: by priority, then by fewest lost tokens, then newest."""
    return request.priority, -request.num_output_tokens, request.ticket


def _first_in_line(state: State) -> Request | None:
    """The first waiting request that waits for no other to fill its blocks."""
    for request in islice(state.pending.in_order(), 4 * state.rows.num_rows):
        if not state.memory.prefix_cache.awaits(request):
            return None if request.num_in_flight else request
    return None


def _fewest_victims(batch: Batch, favoured: Request) -> list[Request] | None:
    """The fewest requests to preempt for it, perhaps none; None if it overtakes nobody, or if all
    that it overtakes would not suffice."""
    state = batch.state
    overtaken = [r for r in batch.active_before if overtakes(state, favoured, r)]
    candidate = admission(state, favoured) if overtaken else None
    if candidate is None:
        return None
    counts, ending = counts_after_results(state)
    counts.share_tables(candidate.shared)
    tables = state.memory.tables
    needs = _Needs(state, candidate, ending)
    rows_needed = 1 + len(favoured.siblings) - state.rows.num_free - len(ending)
    # while blocks are quarantined, earlier victims cover the need already
    requests = [] if quarantined(state) else [r for r in overtaken if r.row not in ending]
    eligible = units(sorted(requests, key=_expendable, reverse=True))
    tables_of = {unit[0]: [tables.of_row(request.row) for request in unit] for unit in eligible}
    num_held = {
        first: sum(len(table) for row in held for table in row) for first, held in tables_of.items()
    }
    if counts.shortfall(needs.without(requests)) > sum(num_held.values()):
        return None
    chosen: list[Request] = []
    while True:
        shortfall = counts.shortfall(needs.without(chosen))
        if shortfall <= 0 and rows_needed <= 0:
            return chosen
        if not eligible:
            return None
        victim = eligible[0]
        if shortfall > 0 and rows_needed <= _num_rows(victim):
            # the least urgent one that suffices alone, else the one with most blocks
            sufficient = (
                unit
                for unit in eligible
                if num_held[unit[0]] >= shortfall
                and _suffices(counts, needs, [*chosen, *unit], tables_of[unit[0]])
            )
            most = max(eligible, key=lambda unit: num_held[unit[0]])
            victim = next(sufficient, most)
        for held in tables_of[victim[0]]:
            counts.give_tables(held)
        rows_needed -= _num_rows(victim)
        eligible.remove(victim)
        chosen += victim


def _num_rows(unit: list[Request]) -> int:
    """Rows that requests preempted together free, with those of siblings not yet forked off."""
    group = unit[0].beams
    if group is not None:
        return len(group.members)
    return sum(1 + len(request.siblings) for request in unit)


def _suffices(
    counts: Counts, needs: _Needs, victims: list[Request], tables: list[list[Int32]]
) -> bool:
    """Whether blocks of these victims cover the need; `tables` are those that `counts` still holds
    as owned."""
    for held in tables:
        counts.give_tables(held)
    suffices = counts.fits(needs.without(victims))
    for held in tables:
        counts.share_tables(held)
    return suffices


def _whole_prompt(state: State, candidate: Admission) -> list[int]:
    """Blocks [G] that a waiting request takes until its prompt is computed."""
    page_size = state.memory.page_size
    pages = -(-len(candidate.request.token_ids) // page_size)
    blocks = []
    for allocator, first, table in zip(
        state.memory.groups, candidate.first_pages, candidate.tables, strict=True
    ):
        held = pages - first
        if allocator.sliding_window:
            read = allocator.sliding_window - 1 + state.limits.max_batch_tokens
            held = min(held, -(-read // page_size) + 1)
        blocks.append(max(0, held - len(table)) + int((table < 0).sum()))
    return blocks


class _Needs:
    """Blocks [G] for a whole prompt and for the next tokens of the rows that decode beside it."""

    def __init__(self, state: State, candidate: Admission, ending: list[int]) -> None:
        rows, in_use = state.rows, state.rows.in_use()
        self._prompt = _whole_prompt(state, candidate)
        decoding = in_use[rows.is_decoding[in_use] & (rows.to_compute(in_use) > 0)]
        self._rows = decoding[~np.isin(decoding, ending)]
        ends = rows.computed[self._rows] + np.int32(1)
        self._decodes = state.memory.blocks_needed(self._rows, ends)

    def without(self, victims: list[Request]) -> list[int]:
        """Blocks [G] needed once these have been preempted."""
        remains = ~np.isin(self._rows, [request.row for request in victims])
        decodes = self._decodes[:, remains].sum(axis=1).tolist()
        return [prompt + count for prompt, count in zip(self._prompt, decodes, strict=True)]
