"""Applies a step's result to the state: tokens, ends, prefix-cache names, released pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from protos.plan import Int32, StepResult
from scheduler_svc.core.lock_step import advance_beams
from scheduler_svc.core.request import Request, RequestState, TokenScore
from scheduler_svc.core.state import InFlight, State
from scheduler_svc.core.step.result_check import why_not_the_result


@dataclass(slots=True)
class Absorbed:
    """What a result changed. An ended request is FINISHED and has its finish_reason."""

    sampled: list[Request] = field(default_factory=list)  # their last token_ids are new
    scored: list[Request] = field(default_factory=list)  # their last prompt_scores are new
    ended: list[Request] = field(default_factory=list)
    not_finite: list[Request] = field(default_factory=list)  # unfinished; the caller fails them


def absorb(state: State, result: StepResult) -> Absorbed:
    """Applies the result of the oldest plan in flight; it must match (why_not_the_result)."""
    step = state.in_flight.popleft()
    mismatch = why_not_the_result(step, result)
    assert mismatch is None, mismatch
    state.step_cost.learn(step.num_new_tokens, step.ends, result.device_microseconds / 1e6)
    for swap_blocks in step.freed_swap:
        state.memory.free_swap(swap_blocks)
    for _, tables in step.transfers.quarantined:
        state.memory.device.give_tables(tables)
    rows = state.rows
    is_tenant = rows.generation[step.named] == step.generation  # not preempted meanwhile
    rows.num_in_flight[step.named[is_tenant]] -= 1
    for place in np.flatnonzero(~is_tenant).tolist():
        step.requests[place].num_in_flight -= 1

    absorbed = Absorbed()
    is_finite = result.is_finite.astype(np.bool_)
    is_current = is_tenant[: len(step.rows)]
    if not is_finite.all():
        rows.is_tainted[step.rows[is_current & ~is_finite]] = True  # later tokens read this KV
        absorbed.not_finite = [
            step.requests[place]
            for place in np.flatnonzero(~is_finite).tolist()
            if step.requests[place].state is not RequestState.FINISHED
        ]
    is_accepted, ends = _verify(state, step, result.token_ids, is_current)
    scores = step.reports.scores(result)
    may_end = _append_tokens(
        state, step, result.token_ids, is_accepted, is_tenant, is_finite, scores, absorbed
    )
    _append_prompt_scores(step, scores, is_finite, absorbed)
    _publish(state, step, ends, is_current & ~rows.is_tainted[step.rows])
    _release_out_of_window(state, step, ends, is_current)
    if step.reports.is_beam.any():
        absorbed.ended += _advance_beams(state, step)
    may_end += [step.requests[place] for place in step.unsampled if is_finite[place]]
    _end(state, may_end, absorbed)
    if state.suspects.is_active:
        state.suspects.record_progress(step.reaches(ends))
    _release_ended(state, step)
    return absorbed


def _verify(
    state: State, step: InFlight, token_ids: Int32, is_current: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.bool_], Int32]:
    """Compares draft tokens with samples: a sample is accepted if every draft token before it was
    right. Rows are cut back to their last accepted sample, and release the pages behind it.

    Returns which samples are accepted [S], and the ends [R] of accepted tokens with KV.
    """
    is_accepted, ends = np.ones(len(step.sampled), np.bool_), step.ends.copy()
    for place, draft in step.drafts.items():
        request = step.requests[place]
        begin = int(np.searchsorted(step.sampled_for, place))
        sampled = token_ids[begin : begin + len(draft) + 1].tolist()
        num_accepted = 1
        for token_id, drafted in zip(sampled, draft, strict=False):
            if token_id != drafted or token_id in request.sampling.stop_token_ids:
                break
            num_accepted += 1
        num_rejected = len(sampled) - num_accepted
        request.num_drafted += len(draft)
        request.num_accepted += num_accepted - 1
        state.counters.drafted += len(draft)
        state.counters.accepted += num_accepted - 1
        is_accepted[begin + num_accepted : begin + len(sampled)] = False
        ends[place] -= num_rejected
        row = int(step.rows[place])
        if is_current[place] and not state.rows.is_finished[row]:
            state.rows.outstanding[row] -= num_rejected
            state.rows.computed[row] -= num_rejected
            state.memory.release_tail(row, int(state.rows.computed[row]))
    return is_accepted, ends


def _append_tokens(
    state: State,
    step: InFlight,
    token_ids: Int32,
    is_accepted: npt.NDArray[np.bool_],
    is_tenant: npt.NDArray[np.bool_],
    is_finite: npt.NDArray[np.bool_],
    scores: Iterator[TokenScore],
    absorbed: Absorbed,
) -> list[Request]:
    """Appends the samples [S], for all rows at once, and their scores, the first of `scores`.
    Returns the requests that may end by them."""
    if step.reports.is_beam.any():  # their candidates are kept until the whole group's have come
        is_accepted = is_accepted & ~step.reports.is_beam
    rows, token_ids = state.rows, token_ids[is_accepted]
    sampled, sampled_for = step.sampled[is_accepted], step.sampled_for[is_accepted]
    has_row = is_tenant[sampled_for]
    sampled_rows = step.named[sampled_for]
    has_ended = rows.is_finished[sampled_rows]
    for place in np.flatnonzero(~has_row).tolist():  # preempted, perhaps ended since
        has_ended[place] = step.requests[sampled_for[place]].state is RequestState.FINISHED
    kept_rows = sampled_rows[has_row]
    if step.drafts:  # rows may repeat
        np.add.at(rows.known, kept_rows, 1)
        np.add.at(rows.outstanding, kept_rows, -1)
    else:
        rows.known[kept_rows] += 1
        rows.outstanding[kept_rows] -= 1
    rows.last_token[kept_rows] = token_ids[has_row]
    if rows.num_speculating:
        rows.num_drafts[kept_rows] = 0  # drafts follow the tokens known then

    may_end = ~has_row | (rows.known[sampled_rows] >= rows.limit[sampled_rows])
    may_end |= rows.may_stop(sampled_rows, token_ids)
    is_appended = is_finite[sampled] & ~has_ended
    if len(step.reports.num_candidates):
        is_accepted = is_accepted.copy()
        is_accepted[is_accepted] = is_appended
        reported = step.reports.reported_samples
        places, is_kept = step.sampled_for[reported].tolist(), is_accepted[reported].tolist()
        # `scores` comes last, so that zip leaves those of prompts
        for place, kept, score in zip(places, is_kept, scores, strict=False):
            request = step.requests[place]
            if kept:
                request.scores.append(score)
            elif request.beams is not None and is_tenant[place] and is_finite[place]:
                request.beams.arrive(request, score)
    requests = step.requests
    if not is_appended.all() or len(is_appended) != len(requests) or step.drafts:
        requests = list(map(requests.__getitem__, sampled_for[is_appended].tolist()))
        token_ids, may_end = token_ids[is_appended], may_end[is_appended]
    for request, token_id in zip(requests, token_ids.tolist(), strict=True):
        request.token_ids.append(token_id)
    absorbed.sampled = list(dict.fromkeys(requests)) if step.drafts else requests
    return [requests[place] for place in np.flatnonzero(may_end).tolist()]


def _advance_beams(state: State, step: InFlight) -> list[Request]:
    """Advances the searches of which candidates of all beams have come. Returns the requests that
    have answers now."""
    answered = []
    for place in step.sampled_for[step.reports.is_beam].tolist():
        request = step.requests[place]
        is_live = request.state is not RequestState.FINISHED
        if is_live and request.beams is not None and request.beams.is_complete:
            answered += advance_beams(state, request.beams)
    return answered


def _append_prompt_scores(
    step: InFlight,
    scores: Iterator[TokenScore],
    is_finite: npt.NDArray[np.bool_],
    absorbed: Absorbed,
) -> None:
    """Appends the scores of prompts that continue those returned before."""
    for scored in step.reports.prompts:
        request = step.requests[scored.place]
        new = list(islice(scores, scored.end - scored.begin))
        is_next = scored.begin == len(request.prompt_scores) + 1
        if is_next and is_finite[scored.place] and request.state is not RequestState.FINISHED:
            request.prompt_scores += new
            absorbed.scored.append(request)


def _end(state: State, may_end: list[Request], absorbed: Absorbed) -> None:
    """Finishes the requests that are complete."""
    for request in dict.fromkeys(may_end):
        if request.state is not RequestState.FINISHED and state.finish_if_complete(request):
            absorbed.ended.append(request)


def _publish(state: State, step: InFlight, ends: Int32, valid: npt.NDArray[np.bool_]) -> None:
    """Names the blocks that the step filled, for the prefix cache. valid [R]: whose KV is sound."""
    if not state.limits.allow_block_sharing:
        return
    rows, memory = state.rows, state.memory
    full = ends // np.int32(memory.page_size)
    begin = rows.published[step.rows]
    places = np.flatnonzero(valid & (full > begin))
    if not len(places):
        return
    filled = step.rows[places]
    begin = begin[places]
    firsts = memory.tables.first[:, filled].T.tolist()  # [n][G]
    tables = memory.tables.blocks[:, filled, begin].T.tolist()  # [n][G] of the first page to name
    published = []
    for place, row, first_page, last_page, first, blocks in zip(
        places.tolist(), filled.tolist(), begin.tolist(), full[places].tolist(), firsts, tables,
        strict=True,
    ):  # fmt: skip
        request = step.requests[place]
        # an ended request may have KV past its last token
        end = min(last_page, len(request.token_ids) // memory.page_size)
        for page in range(first_page, end):
            if page > first_page:  # as a prefill does
                blocks = memory.tables.blocks[:, row, page].tolist()
            memory.prefix_cache.publish(request, page, blocks, first)
        published.append(end)
    rows.published[filled] = published


def _release_out_of_window(
    state: State, step: InFlight, ends: Int32, valid: npt.NDArray[np.bool_]
) -> None:
    """Releases pages that slid out of the window. No later query, planned or not, starts before the
    ends [R] of this step, and no earlier step is in flight."""
    # an ended row of a static batch recomputes its last token
    ends = ends - np.int32(state.holds_ended)
    for group, allocator in enumerate(state.memory.groups):
        if not allocator.sliding_window:
            continue
        first = allocator.first_pages(ends)
        stale = valid & (first > state.memory.tables.first[group, step.rows])
        for place in np.flatnonzero(stale).tolist():
            state.memory.release_head(group, int(step.rows[place]), int(first[place]))


def _release_ended(state: State, step: InFlight) -> None:
    """Releases ended requests whose last plan this was."""
    is_finished = state.rows.is_finished[step.named]
    if is_finished.any():
        tenants = map(state.rows.running.get, step.named[is_finished].tolist())
        ended = [t for t in tenants if t is not None and t.state is RequestState.FINISHED]
        state.release_ended(ended)
