"""Takes a step's result into the state and says what it means for each request."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from protos.plan import StepResult
from scheduler_svc.core.request import FinishReason, Request, RequestState
from scheduler_svc.core.state import InFlight, State


@dataclass(slots=True)
class Absorbed:
    """What came back. A request that a token ended is FINISHED and says why."""

    tokens: list[tuple[Request, int]] = field(default_factory=list)
    not_finite: list[Request] = field(default_factory=list)  # to fail, by name


def absorb(state: State, result: StepResult) -> Absorbed:
    """The result of the oldest plan in flight; results come in the order of the plans."""
    step = state.in_flight.popleft()
    assert result.step_id == step.step_id, (
        f"the result of step {result.step_id} came where {step.step_id} was due"
    )
    assert len(result.token_ids) == len(step.sampled), (
        f"step {step.step_id}: {len(result.token_ids)} tokens for {len(step.sampled)} samples"
    )
    rows = state.rows
    is_tenant = rows.generation[step.rows] == step.generation  # not reset meanwhile
    rows.num_in_flight[step.rows[is_tenant]] -= 1
    for place in np.flatnonzero(~is_tenant).tolist():
        step.requests[place].num_in_flight -= 1

    # the arrays first, for all rows at once; then the requests, one by one
    kept = is_tenant[step.sampled]
    sampled_rows = step.rows[step.sampled][kept]
    rows.known[sampled_rows] += 1
    rows.outstanding[sampled_rows] -= 1
    rows.last_token[sampled_rows] = result.token_ids[kept]

    absorbed = Absorbed()
    is_finite = result.is_finite.astype(np.bool_)
    if not is_finite.all():
        absorbed.not_finite = [
            step.requests[place]
            for place in np.flatnonzero(~is_finite).tolist()
            if step.requests[place].state is not RequestState.FINISHED
        ]
    for place, token_id in zip(step.sampled.tolist(), result.token_ids.tolist(), strict=True):
        request = step.requests[place]
        if request.state is RequestState.FINISHED or not is_finite[place]:
            continue
        request.token_ids.append(token_id)
        if request.state is RequestState.PREFILLING:
            request.state = RequestState.DECODING
        absorbed.tokens.append((request, token_id))
        if token_id in request.sampling.stop_token_ids:
            state.finish(request, FinishReason.STOP, token_id)
        elif len(request.token_ids) == request.max_total_tokens:
            state.finish(request, FinishReason.LENGTH)
    _release_ended(state, step)
    return absorbed


def _release_ended(state: State, step: InFlight) -> None:
    """Gives back what requests held that had ended before, and that this plan named last."""
    rows = state.rows
    idle = rows.is_finished[step.rows] & (rows.num_in_flight[step.rows] == 0)
    for row in step.rows[idle].tolist():
        request = rows.running.get(row)
        if request is not None and request.state is RequestState.FINISHED:
            state.release(request)
