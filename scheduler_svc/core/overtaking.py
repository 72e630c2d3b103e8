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

from scheduler_svc.core.batch import Admission, blocks_needed
from scheduler_svc.core.head_start import admission
from scheduler_svc.core.request import Request
from scheduler_svc.core.room import Room
from scheduler_svc.core.shortage import active_requests, coming, free_at_once, quarantined
from scheduler_svc.core.state import State

LOW_SHARE: Final = 0.1  # of blocks free: the least urgent is swapped out


def overtakes(state: State, request: Request, other: Request) -> bool:
    urgency = state.policy.urgency
    return request.priority < other.priority and urgency(request) < urgency(other)


def choose_victims(state: State, room: Room) -> tuple[list[Request], Request | None]:
    """Whom to preempt, counted into `room`; and the waiting request that may join whatever the
    margin, if there is one."""
    if not state.policy.by_priority:
        return [], None
    active = active_requests(state)
    favoured = _first_in_line(state)
    victims: list[Request] = []
    if favoured is not None:
        overtaken = [request for request in active if overtakes(state, favoured, request)]
        found = _fewest(state, room, favoured, overtaken) if overtaken else None
        if found is None:
            favoured = None
        else:
            victims = found
    if not victims and len(active) > 1 and not quarantined(state):
        least_urgent = max(active, key=_expendable)
        most_urgent = min(request.priority for request in active)
        if room.free_share() < LOW_SHARE and most_urgent < least_urgent.priority:
            victims = [least_urgent]
    for request in free_at_once(state, victims):
        room.give_row(state.rows, request.row)
    return victims, favoured


def _expendable(request: Request) -> tuple[int, int, int]:
    """Higher goes first: by priority, then by what is lost, then by arrival."""
    return request.priority, -request.num_output_tokens, request.ticket


def _first_in_line(state: State) -> Request | None:
    """The first waiting request that does not wait for another to fill its blocks."""
    for request in islice(state.pending.in_order(), 4 * state.rows.num_rows):
        if not state.prefix_cache.awaits(request):
            return None if request.num_in_flight else request
    return None


def _fewest(
    state: State, room: Room, favoured: Request, overtaken: list[Request]
) -> list[Request] | None:
    """The fewest of the overtaken that must go; None if even all of them would not do."""
    begins = admission(state, favoured, ())
    if begins is None:
        return None
    later, ending = coming(state, room)
    for group, table in enumerate(begins.tables):
        later.share(group, table[table >= 0])
    needs = _Needs(state, begins, ending)
    rows_needed = 1 + len(favoured.siblings) - state.rows.num_free - len(ending)
    # whoever was to go before has gone, and its blocks are coming
    left = [] if quarantined(state) else [r for r in overtaken if r.row not in ending]
    left.sort(key=_expendable, reverse=True)
    held = {
        request.row: int((state.rows.table_len - state.rows.table_first)[:, request.row].sum())
        for request in left
    }
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
            victim = next(
                (
                    r
                    for r in left
                    if held[r.row] >= shortfall and _does(state, later, needs, chosen, r)
                ),
                max(left, key=lambda request: held[request.row]),
            )
        later.give_row(state.rows, victim.row)
        rows_needed -= 1 + len(victim.siblings)
        left.remove(victim)
        chosen.append(victim)


def _does(state: State, room: Room, needs: _Needs, chosen: list[Request], request: Request) -> bool:
    """Whether there is room enough when this one goes, too."""
    room.give_row(state.rows, request.row)
    does = room.shortfall(needs.without([*chosen, request])) <= 0
    room.share_row(state.rows, request.row)
    return does


def stays(state: State, room: Room, begins: Admission) -> bool:
    """Whether a waiting request would not be swapped out at once for what its prompt takes."""
    if not state.policy.by_priority:
        return True
    if not any(other.priority < begins.request.priority for other in active_requests(state)):
        return True
    needed = zip(_whole_prompt(state, begins), state.allocators, strict=True)
    chunks = sum(blocks / allocator.blocks_per_chunk for blocks, allocator in needed)
    return room.free_share() - chunks / state.pool.num_usable >= LOW_SHARE


def _whole_prompt(state: State, begins: Admission) -> list[int]:
    """Blocks [G] that a request takes until its prompt is computed."""
    page_size = state.geometry.page_size
    pages = -(-len(begins.request.token_ids) // page_size)
    blocks = []
    for allocator, first, table in zip(
        state.allocators, begins.first_pages, begins.tables, strict=True
    ):
        most = pages - first
        if allocator.sliding_window:
            read = allocator.sliding_window - 1 + state.limits.max_batch_tokens
            most = min(most, -(-read // page_size) + 1)
        blocks.append(max(0, most - len(table)) + int((table < 0).sum()))
    return blocks


class _Needs:
    """Blocks [G] for all of a prompt, and for the next tokens of those that decode beside it."""

    def __init__(self, state: State, begins: Admission, ending: list[int]) -> None:
        self._own = _whole_prompt(state, begins)
        order = state.rows.order()
        decoding = order[state.rows.is_decoding[order] & state.rows.goes_on(order)]
        self._rows = decoding[~np.isin(decoding, ending)]
        self._beside = blocks_needed(state, self._rows, np.ones(len(self._rows), np.int32))

    def without(self, gone: list[Request]) -> list[int]:
        remains = ~np.isin(self._rows, [request.row for request in gone])
        beside = self._beside[:, remains].sum(axis=1).tolist()
        return [own + count for own, count in zip(self._own, beside, strict=True)]
