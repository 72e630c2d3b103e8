"""What a watcher may see of a step; field names are those of protos/admin.proto."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.state import InFlight, State
from scheduler_svc.engine.views import token_places


@dataclass(frozen=True, slots=True)
class StepView:
    """A step as it was planned: what it computes, and the pool and queue beside it."""

    step_id: int
    num_requests: int
    num_tokens: int
    num_prefilling: int
    num_decoding: int
    num_drafted: int
    num_finished: int
    num_running: int
    num_pending: int
    chunks_free: int
    chunks_total: int
    utilisation: float
    preemptions: int


def view_step(state: State, step: InFlight) -> StepView:
    """The newest step in flight, beside the pool and the queue."""
    requests = step.requests[: len(step.rows)]
    is_finished = state.rows.is_finished[step.rows]
    prompt_ends = np.array([request.num_prompt_tokens for request in requests], np.int32)
    # by position, not by state: under run-ahead the state is one step late
    num_drafts = np.zeros(len(requests), np.int32)
    for place, drafts in step.drafts.items():
        num_drafts[place] = len(drafts)
    is_last = step.num_new_tokens - num_drafts == 1
    decodes = is_last & (step.ends - num_drafts > prompt_ends) & ~is_finished
    order = state.rows.in_use()
    stored, could_hold = token_places(state)
    num_decoding, num_finished = int(decodes.sum()), int(is_finished.sum())
    return StepView(
        step_id=step.step_id,
        num_requests=len(requests),
        num_tokens=int(step.num_new_tokens.sum()),
        num_prefilling=len(requests) - num_decoding - num_finished,
        num_decoding=num_decoding,
        num_drafted=int(num_drafts.sum()),
        num_finished=num_finished,
        num_running=len(order) - int(state.rows.is_finished[order].sum()),
        num_pending=len(state.pending),
        chunks_free=state.memory.device.chunks.num_free,
        chunks_total=state.memory.device.chunks.num_usable,
        utilisation=stored / could_hold if could_hold else 0.0,
        preemptions=state.counters.offloads + state.counters.soft_resets,
    )
