"""Flattens a step just put in flight into the arrays of a plan (protos/plan.py)."""

from __future__ import annotations

import numpy as np

from protos.plan import UNKNOWN_TOKEN, Int32, StepPlan
from scheduler_svc.core.memory.block_tables import starts
from scheduler_svc.core.sample_context import sample_context
from scheduler_svc.core.seeds import uniforms
from scheduler_svc.core.state import InFlight, State


def pack(state: State, step: InFlight) -> StepPlan:
    """The plan of the newest step in flight; call it before the state changes again."""
    newest = state.in_flight[-1]
    assert newest is step, f"step {step.step_id} to pack; the newest is {newest.step_id}"
    rows = state.rows
    query_start_loc = starts(step.num_new_tokens)
    tables = state.memory.tables
    table_start, blocks = tables.flat(step.rows)
    sampled_rows = step.named[step.sampled_for]
    sampling = rows.sampling_of(sampled_rows)
    behind = step.ends[step.sampled] - step.sample_ends  # the row's tokens behind the sampled one
    logits_indices = query_start_loc[1:][step.sampled] - np.int32(1) - behind
    sample_logits = np.arange(len(sampled_rows), dtype=np.int32)
    score_logits = np.zeros(0, np.int32)
    if step.reports.prompts:
        score_logits = _score_logits(step, query_start_loc)
    if len(score_logits) or len(step.named) > len(step.rows):
        # forked siblings sample the same logits
        both = np.concatenate([logits_indices, score_logits])
        logits_indices, copies = np.unique(both, return_inverse=True)
        sample_logits, score_logits = np.split(copies.astype(np.int32), [len(sampled_rows)])
    return StepPlan(
        step_id=step.step_id,
        awaits_mask=len(step.constrained) > 0,
        swap_out=_triples(step.transfers.swap_out),
        swap_in=_triples(step.transfers.swap_in),
        copy=_triples(step.transfers.copy),
        init_rows=step.new_tenants,
        token_ids=_token_ids(state, step, query_start_loc),
        rows=step.rows,
        query_start_loc=query_start_loc,
        seq_lens=step.ends,
        table_start=table_start,
        first_positions=tables.first[:, step.rows] * np.int32(state.memory.page_size),
        blocks=blocks,
        logits_indices=logits_indices,
        sample_logits=sample_logits,
        sample_rows=sampled_rows,
        u=uniforms(sampling.streams, step.sample_ends),
        sampling=sampling.parameters,
        score_logits=score_logits,
        **sample_context(state, step),
    )


def _token_ids(state: State, step: InFlight, query_start_loc: Int32) -> Int32:
    """The step's tokens [T]: of decoding rows from arrays, of prompts from their requests."""
    rows = state.rows
    first = step.ends - step.num_new_tokens
    known = rows.known[step.rows]
    at_end = first >= known - 1  # a decode: one token and drafts
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
        # no tokens: an ended row of a static batch past its last token, where any token will do
        token_ids[offset : offset + count] = tokens or rows.last_token[step.rows[place]]
    return token_ids


def _score_logits(step: InFlight, query_start_loc: Int32) -> Int32:
    """The step's tokens [Q] before those that it scores: their logits score these."""
    pieces = []
    for scored in step.reports.prompts:
        offset = int(query_start_loc[scored.place + 1]) - int(step.ends[scored.place]) - 1
        pieces.append(np.arange(scored.begin + offset, scored.end + offset, dtype=np.int32))
    return np.concatenate(pieces)


def _triples(triples: list[tuple[int, int, int]]) -> Int32:
    return np.array(triples, np.int32).reshape(len(triples), 3)
