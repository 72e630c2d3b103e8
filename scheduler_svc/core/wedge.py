"""What to do in a wedge: requests live, no plan is in flight, and no step can be planned.

As far as we know it cannot happen; if it does, memory accounting has a bug. It costs one request,
not the service: the newest running one, else the first pending one, is reset without the prefix
cache, and fails if a wedge finds it again.
"""

from __future__ import annotations

from scheduler_svc.core.request import NO_ROW, Request
from scheduler_svc.core.state import State


def stuck(state: State) -> Request:
    """The request to reset: the newest (least urgent) running one, which holds memory that others
    may need; else the first in the queue."""
    running = state.active()
    if running:
        return max(running, key=state.policy.urgency)
    return next(state.pending.in_order(), None) or next(state.live())


def loosen(state: State, request: Request) -> bool:
    """Resets the request and frees all that it holds; False if that was done before."""
    if request.was_wedged:
        return False
    if request.beams is not None:
        for member in request.beams.members:
            member.was_wedged = True
    request.was_wedged = True
    if request.row != NO_ROW and not state.rows.awaits_fork[request.row]:
        state.preempt([request])
    if request.beams is not None:
        request = request.beams.leader
    state.drop_swapped(request)
    request.may_match = False
    request.awaited = None
    return True


def describe(state: State, request: Request) -> str:
    """The facts for a bug report, in one line."""
    rows, memory = state.rows, state.memory
    swapped = request.swapped and [len(blocks) for blocks in request.swapped.blocks]
    return (
        f"request {request.name}: {request.state}, {request.num_prompt_tokens} prompt and "
        f"{len(request.token_ids)} of {request.max_total_tokens} tokens, "
        f"{len(request.siblings)} siblings to fork, swapped blocks by group {swapped}, "
        f"{request.num_preemptions} preemptions; "
        f"{len(rows.running)} of {rows.num_rows} rows in use, {len(state.pending)} waiting; "
        f"chunks free: {memory.counts.free_chunks} of {memory.counts.num_usable} and blocks of "
        f"held ones {memory.counts.free_blocks}, in the swap pool {memory.swap.counts.free_chunks} "
        f"of {memory.swap.counts.num_usable}; suspects: {state.suspects}; "
        f"policy {state.policy.name}, {state.limits}, {state.geometry}"
    )
