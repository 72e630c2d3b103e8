"""Derives what the model and the attention read from a plan: positions, slots, padding. numpy only.

Padding is appended as requests of their own that share its tokens out evenly (most have one token
or none): token 0 at position 0 for the model, which reads the reserved read block and writes into
the reserved write block. Never -1: plain indexing would wrap round and corrupt the last block.

Owns: positions, slot_mapping, the content of padding. Does not own: whether a plan is valid
(plan_values.py), how much padding there is (padding.py), device memory (step/io_buffers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protos.plan import Int32, StepPlan
from worker.batch.padding import PaddedShape
from worker.kv.geometry import CacheGroup

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class GroupInputs:
    """One cache group's tables. R requests and T tokens, padding included."""

    table_start: Int32  # [R+1] into blocks
    blocks: Int32  # [B] of all groups
    first_positions: Int32  # [R] position of the token that begins the table's first page
    slot_mapping: Int64  # [T] block * page_size + offset: where the token's K and V are stored


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step's inputs. R requests, T tokens and L logits, padding included (and last)."""

    num_tokens: int  # of the plan, without padding; likewise the next two
    num_requests: int
    num_logits: int
    token_ids: Int32  # [T] UNKNOWN_TOKEN = the last sampled token of token_rows
    token_rows: Int32  # [T] 0 for padding
    positions: Int32  # [T]
    query_start_loc: Int32  # [R+1]
    seq_lens: Int32  # [R]
    logits_indices: Int32  # [L]
    groups: tuple[GroupInputs, ...]


def prepare_inputs(
    plan: StepPlan, groups: Sequence[CacheGroup], page_size: int, shape: PaddedShape
) -> StepInputs:
    """The inputs of a plan that `check_plan` let pass, padded to `shape`."""
    query_lens = np.diff(plan.query_start_loc)
    num_tokens, num_logits = len(plan.token_ids), len(plan.logits_indices)
    padding_lens = _padding_lens(shape.num_tokens - num_tokens, shape.num_requests - len(plan.rows))
    zeros = np.zeros(shape.num_tokens - num_tokens, np.int32)
    # position = seq_len - query_len + place within the query
    starts = plan.seq_lens - plan.query_start_loc[1:]
    positions = np.repeat(starts, query_lens) + np.arange(num_tokens, dtype=np.int32)
    return StepInputs(
        num_tokens=num_tokens,
        num_requests=len(plan.rows),
        num_logits=num_logits,
        token_ids=_append(plan.token_ids, zeros),
        token_rows=_append(np.repeat(plan.rows, query_lens), zeros),
        positions=_append(positions, zeros),
        query_start_loc=_append(plan.query_start_loc, num_tokens + np.cumsum(padding_lens)),
        seq_lens=_append(plan.seq_lens, padding_lens),
        # any token's logits will do, since nobody looks at them
        logits_indices=_append(plan.logits_indices, [0] * (shape.num_logits - num_logits)),
        groups=_group_inputs(plan, groups, page_size, positions, padding_lens),
    )


def _padding_lens(tokens: int, requests: int) -> Int32:
    """Tokens of each padding request."""
    assert tokens >= 0, tokens
    assert requests >= min(tokens, 1), (tokens, requests)
    least, more = divmod(tokens, max(requests, 1))
    return least + (np.arange(requests) < more).astype(np.int32)


def _group_inputs(
    plan: StepPlan,
    groups: Sequence[CacheGroup],
    page_size: int,
    positions: Int32,
    padding_lens: Int32,
) -> tuple[GroupInputs, ...]:
    query_lens = np.diff(plan.query_start_loc)
    pages = -(-padding_lens // page_size)  # of each padding request
    ends, num_pages = plan.table_start[:, -1], int(pages.sum())
    blocks = plan.blocks
    if num_pages:
        read_blocks = [group.padding_read_block for group in groups]
        blocks = np.insert(blocks, np.repeat(ends, num_pages), np.repeat(read_blocks, num_pages))
    # spread over the page, so that threads writing padding seldom meet in one cache line
    spread = np.arange(padding_lens.sum(), dtype=np.int64) % page_size
    prepared = []
    for index, group in enumerate(groups):
        start, first_positions = plan.table_start[index], plan.first_positions[index]
        places = positions - np.repeat(first_positions, query_lens)  # within the request's table
        entries = np.repeat(start[:-1], query_lens) + places // page_size
        slots = plan.blocks[entries].astype(np.int64) * page_size + places % page_size
        padding_slots = group.padding_write_block * page_size + spread
        table_start = _append(start, ends[index] + np.cumsum(pages))
        table_start += np.int32(index * num_pages)  # padding of the groups before
        first_positions = _append(first_positions, 0 * padding_lens)
        slot_mapping = np.concatenate([slots, padding_slots])
        prepared.append(GroupInputs(table_start, blocks, first_positions, slot_mapping))
    return tuple(prepared)


def _append(array: npt.NDArray[np.int32], more: npt.ArrayLike) -> Int32:
    return np.concatenate([array, np.asarray(more, np.int32)])
