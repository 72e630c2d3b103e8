"""Flattens a step that was just committed into the arrays of a plan (protos/plan.py)."""

from __future__ import annotations

import numpy as np

from protos.plan import UNKNOWN_TOKEN, Int32, StepPlan
from scheduler_svc.core.seeds import uniforms
from scheduler_svc.core.state import InFlight, State


def pack(state: State, step: InFlight) -> StepPlan:
    """The plan of the newest step in flight; must be called before anything else is committed."""
    assert state.in_flight[-1] is step, f"step {step.step_id} is not the newest"
    rows = state.rows
    query_start_loc = _starts(step.num_new_tokens)
    table_start, blocks = _tables(state, step.rows)
    sampling = step.named[step.sampled_for]  # rows that get a token
    num_samples = len(sampling)
    logits_of, sample_logits = step.sampled, np.arange(num_samples)
    if len(step.named) > len(step.rows):  # siblings are forked off, and sample the same logits
        logits_of, sample_logits = np.unique(step.sampled, return_inverse=True)
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
        first_positions=rows.table_first[:, step.rows] * np.int32(state.geometry.page_size),
        blocks=blocks,
        logits_indices=query_start_loc[1:][logits_of] - np.int32(1),
        sample_logits=sample_logits.astype(np.int32),
        sample_rows=sampling,
        temperature=rows.temperature[sampling],
        top_k=rows.top_k[sampling],
        top_p=rows.top_p[sampling],
        min_p=rows.min_p[sampling],
        u=uniforms(rows.stream[sampling], step.ends[step.sampled]),
        repetition_penalty=np.ones(num_samples, np.float32),
        frequency_penalty=np.zeros(num_samples, np.float32),
        presence_penalty=np.zeros(num_samples, np.float32),
        num_logprobs=np.full(num_samples, -1, np.int32),
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
    token_ids = np.empty(query_start_loc[-1], np.int32)
    at_end = first >= known - 1  # at or past the last known token: one token
    token_ids[query_start_loc[:-1][at_end]] = np.where(
        first < known, rows.last_token[step.rows], UNKNOWN_TOKEN
    )[at_end]
    for place in np.flatnonzero(~at_end).tolist():
        start, count = int(first[place]), int(step.num_new_tokens[place])
        offset = query_start_loc[place]
        tokens = step.requests[place].token_ids[start : start + count]
        # none: an ended row of a static batch, past what it kept, where any token will do
        token_ids[offset : offset + count] = tokens or rows.last_token[step.rows[place]]
    return token_ids


def _tables(state: State, rows: Int32) -> tuple[Int32, Int32]:
    """Block tables of all groups as CSR: starts [G, R+1] and blocks [B]."""
    starts, blocks, offset = [], [], 0
    for group in range(len(state.allocators)):
        first = state.rows.table_first[group, rows]
        lengths = state.rows.table_len[group, rows] - first
        start = _starts(lengths)
        column = np.arange(start[-1]) + np.repeat(first - start[:-1], lengths)
        blocks.append(state.rows.table[group, np.repeat(rows, lengths), column])
        starts.append(start + np.int32(offset))
        offset += int(start[-1])
    return np.stack(starts), np.concatenate(blocks)


def _starts(counts: Int32) -> Int32:
    """Exclusive prefix sums with the total behind them. [n] → [n+1]"""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def _triples(triples: list[tuple[int, int, int]]) -> Int32:
    return np.array(triples, np.int32).reshape(len(triples), 3)


def _none() -> Int32:
    return np.zeros(0, np.int32)
