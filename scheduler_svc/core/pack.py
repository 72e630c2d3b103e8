"""Flattens a step that was just committed into the arrays of a plan (protos/plan.py)."""

from __future__ import annotations

import numpy as np

from protos.plan import UNKNOWN_TOKEN, Int32, StepPlan
from scheduler_svc.core.memory.block_tables import starts
from scheduler_svc.core.seeds import uniforms
from scheduler_svc.core.state import InFlight, State


def pack(state: State, step: InFlight) -> StepPlan:
    """The plan of the newest step in flight; must be called before anything else is committed."""
    assert state.in_flight[-1] is step, f"step {step.step_id} is not the newest"
    rows = state.rows
    query_start_loc = starts(step.num_new_tokens)
    tables = state.memory.tables
    table_start, blocks = tables.flat(step.rows)
    sampling = step.named[step.sampled_for]  # rows that get a token
    num_samples = len(sampling)
    columns = rows.sampling_of(sampling)
    multiplied, added = columns.penalties_off
    behind = step.ends[step.sampled] - step.sample_ends  # tokens of the step, in the same row
    logits_indices = query_start_loc[1:][step.sampled] - np.int32(1) - behind
    sample_logits = np.arange(num_samples, dtype=np.int32)
    if len(step.named) > len(step.rows):  # siblings are forked off, and sample the same logits
        logits_indices, copies = np.unique(logits_indices, return_inverse=True)
        sample_logits = copies.astype(np.int32)
    return StepPlan(
        step_id=step.step_id,
        awaits_mask=False,
        swap_out=_triples(step.transfers.swap_out),
        swap_in=_triples(step.transfers.swap_in),
        copy=_triples(step.transfers.copy),
        init_rows=step.new_tenants,
        init_prompt_lens=np.array(
            [rows.running[row].num_prompt_tokens for row in step.new_tenants.tolist()], np.int32
        ),
        init_history_start=np.zeros(len(step.new_tenants) + 1, np.int32),
        init_history=_none(),
        token_ids=_token_ids(state, step, query_start_loc),
        rows=step.rows,
        query_start_loc=query_start_loc,
        seq_lens=step.ends,
        table_start=table_start,
        first_positions=tables.first[:, step.rows] * np.int32(state.memory.page_size),
        blocks=blocks,
        logits_indices=logits_indices,
        sample_logits=sample_logits,
        sample_rows=sampling,
        temperature=columns.temperature,
        top_k=columns.top_k,
        top_p=columns.top_p,
        min_p=columns.min_p,
        u=uniforms(columns.stream, step.sample_ends),
        repetition_penalty=multiplied,
        frequency_penalty=added,
        presence_penalty=added,
        num_logprobs=columns.no_logprobs,
        bias_start=np.zeros(num_samples + 1, np.int32),
        bias_tokens=_none(),
        bias_values=np.zeros(0, np.float32),
        score_logits=_none(),
        score_targets=_none(),
        score_num_logprobs=_none(),
    )


def _token_ids(state: State, step: InFlight, query_start_loc: Int32) -> Int32:
    """The step's tokens [T]; the last known one, or one not known yet, comes from the arrays."""
    rows = state.rows
    first = step.ends - step.num_new_tokens
    known = rows.known[step.rows]
    at_end = first >= known - 1  # at or past the last known token: one token, but for guesses
    if step.drafts:
        at_end[list(step.drafts)] = False
    lasts = np.where(first < known, rows.last_token[step.rows], np.int32(UNKNOWN_TOKEN))
    if at_end.all():
        return lasts
    token_ids = np.empty(query_start_loc[-1], np.int32)
    token_ids[query_start_loc[:-1][at_end]] = lasts[at_end]
    for place in np.flatnonzero(~at_end).tolist():
        start, count = int(first[place]), int(step.num_new_tokens[place])
        offset = query_start_loc[place]
        tokens = step.requests[place].token_ids[start : start + count]
        tokens.extend(step.drafts.get(place, ()))
        # none: an ended row of a static batch, past what it kept, where any token will do
        token_ids[offset : offset + count] = tokens or rows.last_token[step.rows[place]]
    return token_ids


def _triples(triples: list[tuple[int, int, int]]) -> Int32:
    return np.array(triples, np.int32).reshape(len(triples), 3)


def _none() -> Int32:
    return np.zeros(0, np.int32)
