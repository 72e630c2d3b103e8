"""Refuses plans whose values contradict each other or leave the pool. numpy only.

On a device such a value would end the process, or silently read or corrupt another request's KV.
Dtypes and shapes were checked before (protos/plan.py); what is derived later needs no check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protos.plan import ANY_TOKEN, NO_CANDIDATES, UNKNOWN_TOKEN, Int32, StepPlan
from protos.sampling import SAMPLER_FIELDS
from worker.kv.geometry import CacheGroup


class InvalidPlan(ValueError):
    """A plan that cannot be executed; nothing of it has been."""


@dataclass(frozen=True, slots=True)
class PlanBounds:
    """What a worker can execute."""

    groups: Sequence[CacheGroup]
    page_size: int
    num_blocks: Sequence[int]  # of each group in the pool; likewise in the swap pool
    num_swap_blocks: Sequence[int]
    num_rows: int
    num_embeddings: int  # token ids
    vocab_size: int  # columns of the logits
    max_tokens: int  # of a step
    max_logits: int  # of a step, and scores; samples may be as many, or as many as rows
    max_blocks: int  # block table entries of a step, all groups together
    max_entries: int  # of all candidates that a result holds


def check_plan(plan: StepPlan, bounds: PlanBounds) -> None:
    """Raises InvalidPlan."""
    num_rows, max_logits = bounds.num_rows, bounds.max_logits
    max_samples = max(num_rows, max_logits)
    last_token = bounds.num_embeddings - 1
    last_logits, most = len(plan.logits_indices) - 1, bounds.vocab_size
    for name, limit, first, last in (
        ("token_ids", bounds.max_tokens, UNKNOWN_TOKEN, last_token),
        ("logits_indices", min(max_logits, len(plan.token_ids)), 0, len(plan.token_ids) - 1),
        ("rows", num_rows, 0, num_rows - 1),
        ("init_rows", num_rows, 0, num_rows - 1),
        ("sample_rows", max_samples, 0, num_rows - 1),  # or siblings, which compute nothing yet
        ("sample_logits", max_samples, 0, last_logits),
        ("num_candidates", max_samples, NO_CANDIDATES, most),
        ("is_beam", max_samples, 0, 1),
        ("score_logits", max_logits, 0, last_logits),
        ("score_tokens", max_logits, 0, last_token),
        ("score_candidates", max_logits, 0, most),
    ):
        values = getattr(plan, name)
        if len(values) > limit:
            raise InvalidPlan(f"{name} has {len(values)} entries; allowed: {limit}")
        _check_range(name, values, first, last)
    _check_settings(plan)
    _check_num_entries(plan, bounds)
    num_tokens = max(most, bounds.num_embeddings)  # ids beyond the logits are without effect
    _check_history(plan, num_tokens)
    _check_biases(plan, num_tokens)
    _check_offsets("query_start_loc", plan.query_start_loc, 0, len(plan.token_ids), "tokens")
    query_lens = np.diff(plan.query_start_loc)
    if np.any(query_lens < 1) or np.any(plan.seq_lens < query_lens):
        raise InvalidPlan(
            f"queries have lengths {query_lens.tolist()} and end at seq_lens "
            f"{plan.seq_lens.tolist()}; lengths must lie between 1 and seq_lens"
        )
    _check_moves(plan, bounds)
    if len(plan.blocks) > bounds.max_blocks:
        raise InvalidPlan(f"blocks has {len(plan.blocks)} entries; allowed: {bounds.max_blocks}")
    num_groups, expected = len(plan.table_start), len(bounds.groups)
    if num_groups != expected:
        raise InvalidPlan(
            f"the plan has tables of {num_groups} cache groups; the model has {expected}"
        )
    ends = [0, *plan.table_start[:-1, -1].tolist(), len(plan.blocks)]
    for index, start in enumerate(plan.table_start):
        name = f"cache group {index}: table_start"
        _check_offsets(name, start, ends[index], ends[index + 1], "block table entries")
        _check_tables(plan, index, bounds)


def _check_range(name: str, values: Int32, first: int, last: int) -> None:
    if len(values) and not (values.min() >= first and values.max() <= last):
        odd = values[(values < first) | (values > last)]
        raise InvalidPlan(f"{name} must lie in {first}..{last}, but contain {odd.tolist()}")


def _check_settings(plan: StepPlan) -> None:
    """What else would lead the sampler out of the vocabulary, or make NaN."""
    if not len(plan.u):
        return
    if not (plan.u.min() >= 0 and plan.u.max() < 1):  # NaN neither
        raise InvalidPlan(f"u must lie from 0 to below 1, but is {plan.u.tolist()}")
    together = np.array([plan.sampling[name] for name in SAMPLER_FIELDS], np.float64)
    least, most = together.min(axis=1).tolist(), together.max(axis=1).tolist()
    for (name, entry), first, last in zip(SAMPLER_FIELDS.items(), least, most, strict=True):
        if not (entry.allows(first) and entry.allows(last)):
            values = plan.sampling[name].tolist()
            raise InvalidPlan(f"{name} must be {entry.allowed}, but is {values}")


def _check_num_entries(plan: StepPlan, bounds: PlanBounds) -> None:
    """Entries of candidates; a result that is too large would find no memory."""
    asked = plan.num_candidates[plan.num_candidates >= 0]
    count = len(asked) + len(plan.score_candidates)
    if count:
        count += int(asked.sum(dtype=np.int64) + plan.score_candidates.sum(dtype=np.int64))
    if count > bounds.max_entries:
        raise InvalidPlan(
            f"num_candidates and score_candidates ask for {count} entries; allowed: "
            f"{bounds.max_entries}"
        )


def _check_history(plan: StepPlan, num_tokens: int) -> None:
    start, tokens, counts = plan.history_start, plan.history_tokens, plan.history_counts
    _check_offsets("history_start", start, 0, len(tokens), "history entries")
    if not len(tokens):
        return
    _check_range("history_tokens", tokens, UNKNOWN_TOKEN, num_tokens - 1)
    _check_range("history_counts", counts, 0, 2**24)
    owners = np.repeat(np.arange(len(start) - 1), np.diff(start))[tokens == UNKNOWN_TOKEN]
    if np.any(np.diff(owners) == 0):
        raise InvalidPlan("history_tokens name the unknown token of a sample more than once")


def _check_biases(plan: StepPlan, num_tokens: int) -> None:
    _check_offsets("bias_start", plan.bias_start, 0, len(plan.bias), "bias entries")
    if not len(plan.bias):
        return
    _check_range("bias_tokens", plan.bias_tokens, 0, num_tokens - 1)
    _check_range("bias_after", plan.bias_after, ANY_TOKEN, num_tokens - 1)
    wrong = plan.bias[~(plan.bias < np.inf)]  # NaN, too
    if len(wrong):
        raise InvalidPlan(f"bias must be finite or -inf, but contains {wrong.tolist()}")


def _check_offsets(name: str, offsets: Int32, first: int, last: int, what: str) -> None:
    if offsets[0] != first or offsets[-1] != last or np.any(np.diff(offsets) < 0):
        raise InvalidPlan(
            f"{name} is {offsets.tolist()}; it must rise from {first} to the {last} {what}"
        )


def _check_moves(plan: StepPlan, bounds: PlanBounds) -> None:
    """Swap and copy pairs: existing groups, and blocks of the right pool on each side."""
    own = [range(g.first_block, n) for g, n in zip(bounds.groups, bounds.num_blocks, strict=True)]
    swap = [range(count) for count in bounds.num_swap_blocks]
    for name, sides in (("swap_out", (own, swap)), ("swap_in", (swap, own)), ("copy", (own, own))):
        for index, *pair in getattr(plan, name).tolist():
            if not 0 <= index < len(own):
                raise InvalidPlan(f"{name} names cache group {index} of {len(own)}")
            for block, side in zip(pair, sides, strict=True):
                if block not in side[index]:
                    pool = "swap blocks" if side is swap else "blocks"
                    raise InvalidPlan(
                        f"cache group {index}: {name} from block {pair[0]} to {pair[1]} leaves the "
                        f"{pool} {side[index].start}..{side[index].stop - 1}"
                    )


def _check_tables(plan: StepPlan, index: int, bounds: PlanBounds) -> None:
    """A group's tables: blocks of the pool, and every position that the step reads or writes."""
    group, page_size, start = bounds.groups[index], bounds.page_size, plan.table_start[index]
    blocks, last = plan.blocks[start[0] : start[-1]], bounds.num_blocks[index] - 1
    _check_range(f"cache group {index}: blocks", blocks, group.first_block, last)
    first_positions = plan.first_positions[index]
    covered = first_positions + np.diff(start) * page_size
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
