"""What to do when requests live, no plan is in flight, and no step can be planned: a wedge.

It cannot happen, as far as we know; should it, it is a bug of ours in who may have which memory.
It costs a request, not the service: the newest that runs, else the first that waits, gives back
what it holds and starts afresh, without the prefix cache; if a wedge finds it again, it is to fail.
"""

from __future__ import annotations

from scheduler_svc.core.request import NO_ROW, Request
from scheduler_svc.core.state import State


def stuck(state: State) -> Request:
    """Whom a wedge is put down to: the newest running request, which holds memory that others may
    be waiting for; else the first in the queue."""
    running = state.active()
    if running:
        return max(running, key=state.policy.urgency)
    return next(state.pending.in_order(), None) or next(state.live())


def loosen(state: State, request: Request) -> bool:
    """Takes everything from the request; False if that has been done before and did not help."""
    if request.was_wedged:
        return False
    request.was_wedged = True
    if request.row != NO_ROW and not state.rows.awaits_fork[request.row]:
        state.preempt([request])
    state.drop_swapped(request)
    request.may_match = False
    request.awaited = None
    return True


def describe(state: State, request: Request) -> str:
    """What a report of the bug needs."""
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
