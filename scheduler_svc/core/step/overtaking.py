"""Whom the priority policy preempts before a step is planned, and who joins it for that.

A waiting request *overtakes* running ones that are less urgent, by priority and by urgency: one
that has aged its way to the front stays there. When rows or blocks are missing for it, those whom
it overtakes are preempted until all of its prompt fits: the fewest that do, the least urgent of
them; none if all of them would not do, or if what is coming does. It joins whatever the margin,
and goes on so: else those who decode below the margin would keep it out until they end.

Fewer than 10 % of the blocks free, and the least urgent running request less urgent than another:
it is swapped out, one a step. The policy's margin of 20 % is wider, and who waits joins beside more
urgent ones only if its prompt leaves those 10 % free, so that nobody comes and goes.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

import numpy as np

from scheduler_svc.core.memory.counts import Counts
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import State
from scheduler_svc.core.step.batch import Admission, Batch
from scheduler_svc.core.step.head_start import admission
from scheduler_svc.core.step.shortage import coming, give, quarantined

LOW_SHARE: Final = 0.1  # of blocks free: the least urgent is swapped out


def overtakes(state: State, request: Request, other: Request) -> bool:
    urgency = state.policy.urgency
    return request.priority < other.priority and urgency(request) < urgency(other)


def make_way(batch: Batch) -> Request | None:
    """Preempts whom the policy preempts before anybody is offered a place. Returns the waiting
    request that may join whatever the margin, if there is one."""
    state = batch.state
    if not state.policy.by_priority:
        return None
    favoured, victims = _first_in_line(state), []
    if favoured is not None:
        overtaken = [request for request in batch.ran if overtakes(state, favoured, request)]
        found = _fewest(state, favoured, overtaken) if overtaken else None
        if found is None:
            favoured = None
        else:
            victims = found
    if favoured and batch.cell not in (None, state.suspects.cell_of(favoured)):
        return None  # room is made for it when it is its turn
    if not victims and len(batch.ran) > 1 and not quarantined(state):
        least_urgent = max(batch.ran, key=_expendable)
        most_urgent = min(request.priority for request in batch.ran)
        if state.memory.counts.free_share() < LOW_SHARE and most_urgent < least_urgent.priority:
            victims = [least_urgent]
    batch.preempt(victims)
    return favoured


def stays(batch: Batch, begins: Admission) -> bool:
    """Whether a waiting request would not be swapped out at once for what its prompt takes."""
    state, priority = batch.state, begins.request.priority
    if not state.policy.by_priority or all(other.priority >= priority for other in batch.ran):
        return True
    counts = state.memory.counts
    pairs = zip(_whole_prompt(state, begins), counts.blocks_per_chunk, strict=True)
    chunks = sum(blocks / per_chunk for blocks, per_chunk in pairs)
    return counts.free_share() - chunks / counts.num_usable >= LOW_SHARE


def _expendable(request: Request) -> tuple[int, int, int]:
    """Higher goes first: by priority, then by what is lost, then by arrival."""
    return request.priority, -request.num_output_tokens, request.ticket


def _first_in_line(state: State) -> Request | None:
    """The first waiting request that does not wait for another to fill its blocks."""
    for request in islice(state.pending.in_order(), 4 * state.rows.num_rows):
        if not state.memory.prefix_cache.awaits(request):
            return None if request.num_in_flight else request
    return None


def _fewest(state: State, favoured: Request, overtaken: list[Request]) -> list[Request] | None:
    """The fewest of the overtaken that must go; None if even all of them would not do."""
    begins = admission(state, favoured)
    if begins is None:
        return None
    later, ending = coming(state)
    for group, blocks in enumerate(begins.shared):
        later.share(group, blocks)
    tables = state.memory.tables
    needs = _Needs(state, begins, ending)
    rows_needed = 1 + len(favoured.siblings) - state.rows.num_free - len(ending)
    # whoever was to go before has gone, and its blocks are coming
    left = [] if quarantined(state) else [r for r in overtaken if r.row not in ending]
    left.sort(key=_expendable, reverse=True)
    held = {request.row: sum(map(len, tables.of_row(request.row))) for request in left}
    if later.shortfall(needs.without(left)) > sum(held.values()):
        return None
    chosen: list[Request] = []
    while True:
        shortfall = later.shortfall(needs.without(chosen))
        if shortfall <= 0 and rows_needed <= 0:
            return chosen
        if not left:
            return None
        victim = left[0]
        if shortfall > 0 and rows_needed <= 1 + len(victim.siblings):
            # the least urgent one that would do; if none would, the one that holds most
            enough = (
                request
                for request in left
                if held[request.row] >= shortfall and _does(state, later, needs, chosen, request)
            )
            victim = next(enough, None) or max(left, key=lambda request: held[request.row])
        give(later, tables.of_row(victim.row))
        rows_needed -= 1 + len(victim.siblings)
        left.remove(victim)
        chosen.append(victim)


def _does(
    state: State, later: Counts, needs: _Needs, chosen: list[Request], request: Request
) -> bool:
    """Whether there is room enough when this one goes, too."""
    gone = state.memory.tables.of_row(request.row)
    give(later, gone)
    does = later.shortfall(needs.without([*chosen, request])) <= 0
    for group, blocks in enumerate(gone):
        later.share(group, blocks)
    return does


def _whole_prompt(state: State, begins: Admission) -> list[int]:
    """Blocks [G] that a request takes until its prompt is computed."""
    page_size = state.memory.page_size
    pages = -(-len(begins.request.token_ids) // page_size)
    blocks = []
    for allocator, first, table, restored in zip(
        state.memory.groups, begins.first_pages, begins.tables, begins.num_restored, strict=True
    ):
        most = pages - first
        if allocator.sliding_window:
            read = allocator.sliding_window - 1 + state.limits.max_batch_tokens
            most = min(most, -(-read // page_size) + 1)
        blocks.append(max(0, most - len(table)) + restored)
    return blocks


class _Needs:
    """Blocks [G] for all of a prompt, and for the next tokens of those that decode beside it."""

    def __init__(self, state: State, begins: Admission, ending: list[int]) -> None:
        rows, in_use = state.rows, state.rows.in_use()
        self._own = _whole_prompt(state, begins)
        decoding = in_use[rows.is_decoding[in_use] & (rows.to_compute(in_use) > 0)]
        self._rows = decoding[~np.isin(decoding, ending)]
        ends = rows.computed[self._rows] + np.int32(1)
        self._beside = state.memory.blocks_needed(self._rows, ends)

    def without(self, gone: list[Request]) -> list[int]:
        remains = ~np.isin(self._rows, [request.row for request in gone])
        beside = self._beside[:, remains].sum(axis=1).tolist()
        return [own + count for own, count in zip(self._own, beside, strict=True)]
