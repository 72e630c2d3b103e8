"""Takes a step's result into the state and says what it means for each request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from protos.plan import Int32, StepResult
from scheduler_svc.core.request import FinishReason, Request, RequestState
from scheduler_svc.core.state import InFlight, State

MAX_MICROSECONDS: Final = 86_400_000_000  # of one step: a day


@dataclass(slots=True)
class Absorbed:
    """What came back. A request that a token ended is FINISHED and says why."""

    sampled: list[Request] = field(default_factory=list)  # each got a token: its last one
    ended: list[Request] = field(default_factory=list)  # those of them that it ended
    not_finite: list[Request] = field(default_factory=list)  # to fail, by name


def why_not_the_result(step: InFlight, result: StepResult, vocab_size: int = 0) -> str | None:
    """What contradicts the plan in a result that a worker sent for it; None if nothing does.

    `vocab_size` bounds the token ids; 0 = not known.
    """
    if result.step_id != step.step_id:
        return f"the result of step {result.step_id} came where {step.step_id} was due"
    if len(result.token_ids) != len(step.sampled):
        return f"{len(result.token_ids)} tokens for {len(step.sampled)} samples"
    if len(result.is_finite) != len(step.rows):
        return f"{len(result.is_finite)} verdicts on {len(step.rows)} rows"
    if vocab_size:
        odd = result.token_ids[(result.token_ids < 0) | (result.token_ids >= vocab_size)]
        if len(odd):
            return f"token {odd[0]} is outside of the vocabulary of {vocab_size}"
    if np.count_nonzero(result.is_finite >> 1):  # also of negative numbers
        odd = result.is_finite[result.is_finite >> 1 != 0]
        return f"{odd[0]} as a verdict on a row; allowed: 0, 1"
    for name in ("device_microseconds", "queue_microseconds"):
        if not 0 <= getattr(result, name) <= MAX_MICROSECONDS:
            return f"{name} is {getattr(result, name)}"
    return None


def absorb(state: State, result: StepResult) -> Absorbed:
    """The result of the oldest plan in flight; results come in the order of the plans."""
    step = state.in_flight.popleft()
    assert why_not_the_result(step, result) is None, why_not_the_result(step, result)
    state.step_cost.learn(step.num_new_tokens, step.ends, result.device_microseconds / 1e6)
    state.free_swap(step.freed_swap)
    for _, tables in step.transfers.quarantined:
        state.give_back(tables)
    rows = state.rows
    is_tenant = rows.generation[step.named] == step.generation  # not preempted meanwhile
    if is_tenant.all():
        rows.num_in_flight[step.named] -= 1
    else:
        rows.num_in_flight[step.named[is_tenant]] -= 1
        for place in np.flatnonzero(~is_tenant).tolist():
            step.requests[place].num_in_flight -= 1

    is_finite = result.is_finite.astype(np.bool_)
    computed_here = is_tenant[: len(step.rows)]
    if not is_finite.all():
        rows.is_tainted[step.rows[computed_here & ~is_finite]] = True  # what follows builds on it
    _publish(state, step, computed_here & ~rows.is_tainted[step.rows])
    _leave_behind(state, step, computed_here)

    absorbed = Absorbed()
    if not is_finite.all():
        absorbed.not_finite = [
            step.requests[place]
            for place in np.flatnonzero(~is_finite).tolist()
            if step.requests[place].state is not RequestState.FINISHED
        ]
    _take_tokens(state, step, result.token_ids, is_tenant, is_finite, absorbed)
    if state.suspects.is_active:
        state.suspects.came_back(step.reaches())
    _release_ended(state, step)
    return absorbed


def _take_tokens(
    state: State,
    step: InFlight,
    token_ids: Int32,
    is_tenant: npt.NDArray[np.bool_],
    is_finite: npt.NDArray[np.bool_],
    absorbed: Absorbed,
) -> None:
    """The arrays for all rows at once; one by one only those with whom more happens than that
    they get a token."""
    rows = state.rows
    has_row = is_tenant[step.sampled_for]
    sampled_rows = step.named[step.sampled_for]
    has_ended = rows.is_finished[sampled_rows]
    kept_rows, kept_tokens = sampled_rows, token_ids
    if not has_row.all():
        kept_rows, kept_tokens = sampled_rows[has_row], token_ids[has_row]
        for place in np.flatnonzero(~has_row).tolist():  # preempted, and perhaps ended after that
            request = step.requests[step.sampled_for[place]]
            has_ended[place] = request.state is RequestState.FINISHED
    rows.known[kept_rows] += 1
    rows.outstanding[kept_rows] -= 1
    rows.last_token[kept_rows] = kept_tokens

    may_end = ~has_row | (rows.known[sampled_rows] >= rows.limit[sampled_rows])
    may_end |= rows.may_stop(sampled_rows, token_ids)
    takes = is_finite[step.sampled] & ~has_ended
    requests = step.requests
    if not takes.all() or len(takes) < len(requests):
        requests = list(map(requests.__getitem__, step.sampled_for[takes].tolist()))
        token_ids, may_end = token_ids[takes], may_end[takes]
    for request, token_id in zip(requests, token_ids.tolist(), strict=True):
        request.token_ids.append(token_id)
    absorbed.sampled = requests

    for place in np.flatnonzero(may_end).tolist():
        request = requests[place]
        token_id = request.token_ids[-1]
        if token_id in request.sampling.stop_token_ids:
            state.finish(request, FinishReason.STOP, token_id)
        elif len(request.token_ids) == request.max_total_tokens:
            state.finish(request, FinishReason.LENGTH)
        else:
            continue
        absorbed.ended.append(request)


def _publish(state: State, step: InFlight, valid: npt.NDArray[np.bool_]) -> None:
    """Names the blocks that the step has filled. valid [R]: rows whose content can be trusted."""
    if not state.limits.allow_block_sharing:
        return
    rows = state.rows
    full = step.ends // np.int32(state.geometry.page_size)
    begin = rows.published[step.rows]
    places = np.flatnonzero(valid & (full > begin))
    if not len(places):
        return
    filled = step.rows[places]
    begin = begin[places]
    firsts = rows.table_first[:, filled].T.tolist()  # [n][G]
    tables = rows.table[:, filled, begin].T.tolist()  # [n][G] of the first page to be named
    ends = []
    for place, row, first_page, last_page, first, blocks in zip(
        places.tolist(), filled.tolist(), begin.tolist(), full[places].tolist(), firsts, tables,
        strict=True,
    ):  # fmt: skip
        request = step.requests[place]
        # an ended request may have been computed past the tokens that it kept
        end = min(last_page, len(request.token_ids) // state.geometry.page_size)
        for page in range(first_page, end):
            if page > first_page:  # as a prefill does
                blocks = rows.table[:, row, page].tolist()
            state.prefix_cache.publish(request, page, blocks, first)
        ends.append(end)
    rows.published[filled] = ends


def _leave_behind(state: State, step: InFlight, valid: npt.NDArray[np.bool_]) -> None:
    """Gives back pages that left the window: every later query, planned or not, begins at the
    end of this step or behind it, and no earlier step is in flight."""
    rows = state.rows
    # under the static policy a row that has ended computes its last token again
    is_last_again = np.int32(state.policy.holds_finished)
    for group, allocator in enumerate(state.allocators):
        if not allocator.sliding_window:
            continue
        first = allocator.first_pages(step.ends - is_last_again)
        stale = valid & (first > rows.table_first[group, step.rows])
        for place in np.flatnonzero(stale).tolist():
            state.leave_behind(group, int(step.rows[place]), int(first[place]))


def _release_ended(state: State, step: InFlight) -> None:
    """Gives back what requests held that had ended before, and that this plan named last."""
    rows = state.rows
    if state.policy.holds_finished:
        state.release_ended_batch()
        return
    idle = rows.is_finished[step.named] & (rows.num_in_flight[step.named] == 0)
    for row in step.named[idle].tolist():
        tenant = rows.running.get(row)
        if tenant is not None and tenant.state is RequestState.FINISHED:
            state.release(tenant)
