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
    seq_lens = rows.computed[step.rows]
    table_start, blocks = _tables(state, step.rows)
    sampling = step.rows[step.sampled]
    num_samples = len(sampling)
    return StepPlan(
        step_id=step.step_id,
        awaits_mask=False,
        swap_out=_none(2),
        swap_in=_none(2),
        copy=_none(3),
        init_rows=step.admitted,
        init_prompt_lens=np.array(
            [rows.running[row].num_prompt_tokens for row in step.admitted.tolist()], np.int32
        ),
        init_history_start=np.zeros(len(step.admitted) + 1, np.int32),
        init_history=_none(),
        token_ids=_token_ids(state, step, query_start_loc, seq_lens),
        rows=step.rows,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        table_start=table_start,
        first_positions=np.zeros((len(state.allocators), len(step.rows)), np.int32),
        blocks=blocks,
        logits_indices=query_start_loc[1:][step.sampled] - np.int32(1),
        sample_logits=np.arange(num_samples, dtype=np.int32),
        sample_rows=sampling,
        temperature=rows.temperature[sampling],
        top_k=rows.top_k[sampling],
        top_p=rows.top_p[sampling],
        min_p=rows.min_p[sampling],
        u=uniforms(rows.seed[sampling], rows.sibling[sampling], seq_lens[step.sampled]),
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


def _token_ids(state: State, step: InFlight, query_start_loc: Int32, seq_lens: Int32) -> Int32:
    """The step's tokens [T]; the last known one, or one not known yet, comes from the arrays."""
    rows = state.rows
    first = seq_lens - step.num_new_tokens
    known = rows.known[step.rows]
    token_ids = np.empty(query_start_loc[-1], np.int32)
    ends = first >= known - 1  # at or past the last known token: one token
    token_ids[query_start_loc[:-1][ends]] = np.where(
        first < known, rows.last_token[step.rows], UNKNOWN_TOKEN
    )[ends]
    for place in np.flatnonzero(~ends).tolist():
        start, count = int(first[place]), int(step.num_new_tokens[place])
        offset = query_start_loc[place]
        token_ids[offset : offset + count] = step.requests[place].token_ids[start : start + count]
    return token_ids


def _tables(state: State, rows: Int32) -> tuple[Int32, Int32]:
    """Block tables of all groups as CSR: starts [G, R+1] and blocks [B]."""
    starts, blocks, offset = [], [], 0
    for group in range(len(state.allocators)):
        lengths = state.rows.table_len[group, rows]
        start = _starts(lengths)
        column = np.arange(start[-1]) - np.repeat(start[:-1], lengths)
        blocks.append(state.rows.table[group, np.repeat(rows, lengths), column])
        starts.append(start + np.int32(offset))
        offset += int(start[-1])
    return np.stack(starts), np.concatenate(blocks)


def _starts(counts: Int32) -> Int32:
    """Exclusive prefix sums with the total behind them. [n] → [n+1]"""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def _none(*width: int) -> Int32:
    return np.zeros((0, *width), np.int32)
