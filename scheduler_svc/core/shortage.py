"""Who makes room when running requests stall for want of KV memory.

The fewest requests that cover the need, newest first; never one that the step already schedules,
never the last active one, so the oldest always gets on and nothing can wedge. What finished
requests will give back when their plans return counts as coming: then everybody waits for it.

A victim is soft-reset: it keeps its tokens, loses its KV, and waits in its old place of arrival.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from scheduler_svc.core.request import Request, RequestState
from scheduler_svc.core.room import Room
from scheduler_svc.core.state import State


def make_room(
    state: State,
    room: Room,
    needs: Mapping[int, Sequence[int]],
    scheduled: Collection[int],
) -> list[Request]:
    """Victims, newest first; their blocks are counted into `room`.

    `needs` has the blocks of each group that every stalled row wants, `scheduled` the rows that
    this step computes already.
    """
    coming = room.copy()
    active: list[Request] = []
    for row, request in state.rows.running.items():
        if request.state is RequestState.FINISHED:
            coming.give_row(row)
        else:
            active.append(request)
    wanted = dict(needs)
    victims: list[Request] = []
    for request in sorted(active, key=lambda request: request.ticket, reverse=True):
        if not wanted or coming.fits(_total(wanted)) or len(victims) == len(active) - 1:
            break
        if request.row in scheduled:
            continue
        room.give_row(request.row)
        coming.give_row(request.row)
        wanted.pop(request.row, None)
        victims.append(request)
    return victims


def _total(needs: Mapping[int, Sequence[int]]) -> list[int]:
    return [sum(blocks) for blocks in zip(*needs.values(), strict=True)]
