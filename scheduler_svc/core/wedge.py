"""What to do when requests live, no plan is in flight, and no step can be planned: a wedge.

It cannot happen, as far as we know; should it, it is a bug of ours in who may have which memory.
It costs a request, not the service: the newest that runs, else the first that waits, gives back
what it holds and starts afresh, without the prefix cache; if a wedge finds it again, it is to fail.
"""

from __future__ import annotations

from scheduler_svc.core.request import NO_ROW, Request, RequestState
from scheduler_svc.core.state import State


def stuck(state: State) -> Request:
    """Whom a wedge is put down to: the newest running request, which holds memory that others may
    be waiting for; else the first in the queue."""
    running = [
        request
        for row, request in state.rows.running.items()
        if request.state is not RequestState.FINISHED and not state.rows.awaits_fork[row]
    ]
    if running:
        return max(running, key=state.policy.urgency)
    return next(state.pending.in_order(), None) or next(state.live())


def loosen(state: State, request: Request) -> bool:
    """Takes everything from the request; False if that has been done before and did not help."""
    if request.was_wedged:
        return False
    request.was_wedged = True
    if request.row != NO_ROW and not state.rows.awaits_fork[request.row]:
        state.soft_reset(request)
    state.drop_swapped(request)
    request.may_match = False
    request.awaited = None
    return True


def describe(state: State, request: Request) -> str:
    """What a report of the bug needs."""
    rows, geometry = state.rows, state.geometry
    swapped = request.swapped and [len(blocks) for blocks in request.swapped.blocks]
    free = [allocator.num_free for allocator in state.allocators]
    return (
        f"request {request.name}: {request.state}, {request.num_prompt_tokens} prompt and "
        f"{len(request.token_ids)} of {request.max_total_tokens} tokens, "
        f"{len(request.siblings)} siblings to fork, swapped blocks by group {swapped}, "
        f"{request.num_preemptions} preemptions; "
        f"{len(rows.running)} of {rows.num_rows} rows in use, {len(state.pending)} waiting; "
        f"chunks free: {state.pool.num_free} of {state.pool.num_usable} and blocks of held ones "
        f"{free}, in the swap pool {state.swap_pool.num_free} of {state.swap_pool.num_usable}; "
        f"suspects: {state.suspects}; policy {state.policy.name}, {state.limits}, {geometry}"
    )
