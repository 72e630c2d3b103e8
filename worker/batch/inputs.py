"""From a plan to what the model and the attention need: positions, slots, padding. numpy only.

Owns: deriving positions and slot_mapping, appending padding, and refusing plans that would read
or write outside of what their tables say. Does not own: device tensors (runner.py), sampling
parameters (they go to the sampler as they came).

Padding is appended as requests of their own, the tokens shared out evenly among them (so most have
one token or none): token 0, for the model at position 0 whatever its place in its request, reading
the reserved read block and writing into the reserved write block. Never -1: plain indexing would
wrap round and corrupt the last block.
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


class InvalidPlan(ValueError):
    """A plan contradicts itself or the pool; running it would corrupt the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupInputs:
    """One cache group's tables. R requests and T tokens, padding included."""

    table_start: Int32  # [R+1] into blocks
    blocks: Int32  # [B]
    first_positions: Int32  # [R] token position at which the table starts
    slot_mapping: Int64  # [T] block * page_size + offset: where the token's K and V go


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
    plan: StepPlan,
    groups: Sequence[CacheGroup],
    num_blocks: Sequence[int],
    page_size: int,
    shape: PaddedShape,
    *,
    num_swap_blocks: Sequence[int] | None = None,
) -> StepInputs:
    """What the forward of `plan` needs, padded to `shape`.

    `num_blocks` is the pool's count per group, `num_swap_blocks` the swap pool's (none by default).
    Raises InvalidPlan.
    """
    _check_shape(plan, len(groups))
    _check_moves(plan, groups, num_blocks, num_swap_blocks or [0] * len(groups))
    query_lens = np.diff(plan.query_start_loc)
    num_tokens, num_requests = len(plan.token_ids), len(plan.rows)
    padding_lens = _padding_lens(shape, num_tokens, num_requests)
    zeros = np.zeros(shape.num_tokens - num_tokens, np.int32)
    # position = seq_len - query_len + place within the query
    starts = plan.seq_lens - plan.query_start_loc[1:]
    positions = np.repeat(starts, query_lens) + np.arange(num_tokens, dtype=np.int32)
    # any row will do for logits that are thrown away
    num_spare_logits = shape.num_logits - len(plan.logits_indices)
    return StepInputs(
        num_tokens=num_tokens,
        num_requests=num_requests,
        num_logits=len(plan.logits_indices),
        token_ids=_append(plan.token_ids, zeros),
        token_rows=_append(np.repeat(plan.rows, query_lens), zeros),
        positions=_append(positions, zeros),
        query_start_loc=_append(plan.query_start_loc, num_tokens + np.cumsum(padding_lens)),
        seq_lens=_append(plan.seq_lens, padding_lens),
        logits_indices=_append(plan.logits_indices, [0] * num_spare_logits),
        groups=tuple(
            _group_inputs(plan, index, group, num_blocks[index], page_size, positions, padding_lens)
            for index, group in enumerate(groups)
        ),
    )


def _padding_lens(shape: PaddedShape, num_tokens: int, num_requests: int) -> Int32:
    """Tokens of each padding request."""
    tokens, requests = shape.num_tokens - num_tokens, shape.num_requests - num_requests
    assert tokens >= 0, (shape, num_tokens)
    assert requests >= min(tokens, 1), (shape, num_requests)
    lengths = np.zeros(requests, np.int32)
    if requests:
        lengths[:] = tokens // requests
        lengths[: tokens % requests] += 1
    return lengths


def _group_inputs(
    plan: StepPlan,
    index: int,
    group: CacheGroup,
    num_blocks: int,
    page_size: int,
    positions: Int32,
    padding_lens: Int32,
) -> GroupInputs:
    first, last = plan.table_start[index, 0], plan.table_start[index, -1]
    if first < 0 or last > len(plan.blocks) or np.any(np.diff(plan.table_start[index]) < 0):
        raise InvalidPlan(
            f"cache group {index}: table_start is {plan.table_start[index].tolist()}; it must rise "
            f"within the {len(plan.blocks)} block table entries of the plan"
        )
    blocks = plan.blocks[first:last]
    table_start = plan.table_start[index] - first
    first_positions = plan.first_positions[index]
    _check_tables(plan, index, group, num_blocks, page_size, table_start, blocks)

    query_lens = np.diff(plan.query_start_loc)
    places = positions - np.repeat(first_positions, query_lens)  # within the request's table
    entries = np.repeat(table_start[:-1], query_lens) + places // page_size
    slot_mapping = blocks[entries].astype(np.int64) * page_size + places % page_size
    # spread over the page, so that threads writing padding seldom meet in one cache line
    spread = np.arange(padding_lens.sum(), dtype=np.int64) % page_size
    padding_slots = group.padding_write_block * page_size + spread
    pages = -(-padding_lens // page_size)
    return GroupInputs(
        table_start=_append(table_start, len(blocks) + np.cumsum(pages)),
        blocks=_append(blocks, np.full(pages.sum(), group.padding_read_block, np.int32)),
        first_positions=_append(first_positions, 0 * padding_lens),
        slot_mapping=np.concatenate([slot_mapping, padding_slots]),
    )


def _check_shape(plan: StepPlan, num_groups: int) -> None:
    if len(plan.table_start) != num_groups:
        raise InvalidPlan(
            f"the plan has tables of {len(plan.table_start)} cache groups; the model has "
            f"{num_groups}"
        )
    query_lens = np.diff(plan.query_start_loc)
    ends = (plan.query_start_loc[0], plan.query_start_loc[-1])
    if ends != (0, len(plan.token_ids)) or np.any(query_lens < 1):
        raise InvalidPlan(
            f"query_start_loc is {plan.query_start_loc.tolist()}; it must rise from 0 to the "
            f"{len(plan.token_ids)} tokens of the plan"
        )
    if np.any(plan.seq_lens < query_lens):
        raise InvalidPlan(
            f"seq_lens {plan.seq_lens.tolist()} are below the queries' lengths "
            f"{query_lens.tolist()}"
        )
    for name, indices, limit in (
        ("logits_indices", plan.logits_indices, len(plan.token_ids)),
        ("sample_logits", plan.sample_logits, len(plan.logits_indices)),
    ):
        if len(indices) and not (indices.min() >= 0 and indices.max() < limit):
            raise InvalidPlan(f"{name} must lie in 0..{limit - 1}, but are {indices.tolist()}")


def _check_moves(
    plan: StepPlan,
    groups: Sequence[CacheGroup],
    num_blocks: Sequence[int],
    num_swap_blocks: Sequence[int],
) -> None:
    """Swap and copy pairs: existing groups, and blocks of the right pool on each side."""
    own = [(group.first_block, count) for group, count in zip(groups, num_blocks, strict=True)]
    swap = [(0, count) for count in num_swap_blocks]
    for name, triples, sides in (
        ("swap_out", plan.swap_out, (own, swap)),
        ("swap_in", plan.swap_in, (swap, own)),
        ("copy", plan.copy, (own, own)),
    ):
        for index, *pair in triples.tolist():
            if not 0 <= index < len(groups):
                raise InvalidPlan(f"{name} names cache group {index} of {len(groups)}")
            for block, side in zip(pair, sides, strict=True):
                first, end = side[index]
                if not first <= block < end:
                    raise InvalidPlan(
                        f"cache group {index}: {name} from block {pair[0]} to {pair[1]} leaves "
                        f"the {'swap ' if side is swap else ''}blocks {first}..{end - 1}"
                    )


def _check_tables(
    plan: StepPlan,
    index: int,
    group: CacheGroup,
    num_blocks: int,
    page_size: int,
    table_start: Int32,
    blocks: Int32,
) -> None:
    if len(blocks) and not (blocks.min() >= group.first_block and blocks.max() < num_blocks):
        raise InvalidPlan(
            f"cache group {index}: blocks must lie in {group.first_block}..{num_blocks - 1}, but "
            f"range over {blocks.min()}..{blocks.max()}"
        )
    first_positions = plan.first_positions[index]
    covered = first_positions + np.diff(table_start) * page_size
    query_starts = plan.seq_lens - np.diff(plan.query_start_loc)
    oldest = 0 * query_starts  # position that the step's first token still reads
    if group.sliding_window:
        oldest = np.maximum(query_starts - group.sliding_window + 1, 0)
    bad = (covered < plan.seq_lens) | (first_positions < 0) | (first_positions > oldest)
    bad |= first_positions % page_size != 0
    if np.any(bad):
        place = int(np.argmax(bad))
        raise InvalidPlan(
            f"cache group {index}: the table of row {plan.rows[place]} covers positions "
            f"{first_positions[place]}..{covered[place] - 1} in pages of {page_size}, but the step "
            f"computes {query_starts[place]}..{plan.seq_lens[place] - 1} and reads from "
            f"{oldest[place]} on"
        )


def _append(array: npt.NDArray[np.int32], more: npt.ArrayLike) -> Int32:
    return np.concatenate([array, np.asarray(more, np.int32)])
