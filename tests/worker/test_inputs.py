"""Positions, slots and padding of a plan; plans that would corrupt the cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from protos.plan import StepPlan
from tests.support.plan_builder import plan_of
from worker.batch.inputs import StepInputs, prepare_inputs
from worker.batch.padding import row_shape
from worker.batch.plan_values import InvalidPlan, PlanBounds, check_plan
from worker.kv.geometry import FULL_ATTENTION, SLIDING_ATTENTION, CacheGroup

FULL = CacheGroup(FULL_ATTENTION, (0,), 0, 1)
# a decode at position 9 and a chunk of positions 2..5, pages of 4
PLAN = {
    "token_ids": [-1, 11, 12, 13, 14],
    "rows": [7, 3],
    "query_start_loc": [0, 1, 5],
    "seq_lens": [10, 6],
    "table_start": [[0, 3, 5]],
    "blocks": [9, 4, 6, 8, 5],
    "first_positions": [[0, 0]],
    "logits_indices": [0],
    "sample_logits": [0],
    "sample_rows": [7],
}


SCORE = {"score_logits": [0], "score_tokens": [299], "score_candidates": [0]}
HISTORY = {"history_start": [0, 2], "history_tokens": [-1, 299], "history_counts": [1, 0]}
BIAS = {"bias_start": [0, 1], "bias_tokens": [5], "bias_after": [-1], "bias": [-np.inf]}


def prepare_plan(
    plan: StepPlan, groups: Sequence[CacheGroup], num_blocks: Sequence[int], row_multiple: int = 1
) -> StepInputs:
    lengths = (len(plan.token_ids), len(plan.rows), len(plan.logits_indices))
    shape = row_shape(*lengths, longest_query=4, multiple=row_multiple)
    check_plan(
        plan,
        PlanBounds(
            groups=groups,
            page_size=4,
            num_blocks=num_blocks,
            num_swap_blocks=[3] * len(groups),
            num_rows=8,
            num_embeddings=300,
            vocab_size=290,
            max_tokens=16,
            max_logits=12,
            max_blocks=16,
            max_entries=40,
        ),
    )
    return prepare_inputs(plan, groups, 4, shape)


def prepare(row_multiple: int = 1, **changes: object) -> StepInputs:
    return prepare_plan(plan_of(**{**PLAN, **changes}), [FULL], [10], row_multiple)


def test_positions_and_slots():
    """The two derived arrays that everything else hangs on."""
    inputs = prepare()
    assert inputs.positions.tolist() == [9, 2, 3, 4, 5]
    assert inputs.token_rows.tolist() == [7, 3, 3, 3, 3]
    slots = [6 * 4 + 1, 8 * 4 + 2, 8 * 4 + 3, 5 * 4 + 0, 5 * 4 + 1]
    assert inputs.groups[0].slot_mapping.tolist() == slots
    assert inputs.groups[0].table_start.tolist() == [0, 3, 5]
    assert (inputs.num_tokens, inputs.num_requests, inputs.num_logits) == (5, 2, 1)


def test_padding_reads_and_writes_reserved_blocks():
    """Padding at -1 would wrap round and corrupt the last block."""
    inputs = prepare(row_multiple=4)
    assert inputs.token_ids.tolist() == [*PLAN["token_ids"], 0, 0, 0]
    assert inputs.positions[5:].tolist() == [0, 0, 0]
    assert inputs.seq_lens.tolist() == [10, 6, 1, 1, 1]
    assert inputs.query_start_loc.tolist() == [0, 1, 5, 6, 7, 8]
    group = inputs.groups[0]
    assert group.table_start.tolist() == [0, 3, 5, 6, 7, 8]
    assert group.blocks[5:].tolist() == [0, 0, 0]
    assert set(group.slot_mapping[5:] // 4) == {1}
    assert len(inputs.logits_indices) == 4
    assert (inputs.num_tokens, inputs.num_requests, inputs.num_logits) == (5, 2, 1)


def test_nothing_is_padded_where_nothing_is():
    """A chunk in the middle of a prompt needs no logits: lm_head must not run for four rows."""
    inputs = prepare(4, logits_indices=[], sample_logits=[], sample_rows=[])
    assert len(inputs.logits_indices) == 0
    assert prepare_plan(plan_of(), [FULL], [10], row_multiple=4).num_tokens == 0


def test_tables_that_start_later():
    """A sliding group's table says where it starts; groups have tables of their own."""
    sliding = CacheGroup(SLIDING_ATTENTION, (1,), 5, 2)
    plan = plan_of(
        **{
            **PLAN,
            "table_start": [[0, 3, 5], [5, 7, 9]],
            "blocks": [9, 4, 6, 8, 5, 15, 16, 17, 18],
            "first_positions": [[0, 0], [4, 0]],
        }
    )
    inputs = prepare_plan(plan, [FULL, sliding], [10, 20], row_multiple=2)
    assert inputs.groups[1].slot_mapping[:5].tolist() == [65, 70, 71, 72, 73]
    blocks, starts = inputs.groups[1].blocks, [group.table_start for group in inputs.groups]
    assert blocks.tolist() == [9, 4, 6, 8, 5, 0, 15, 16, 17, 18, 0]
    assert [start.tolist() for start in starts] == [[0, 3, 5, 6], [6, 8, 10, 11]]
    assert inputs.groups[1].slot_mapping[5] // 4 == sliding.padding_write_block


def test_sliding_tables_must_reach_back_as_far_as_the_window():
    """A table that starts too late makes the kernel read before it: another request's keys."""
    sliding = CacheGroup(SLIDING_ATTENTION, (0,), 5, 1)
    one = {
        "token_ids": [1],
        "rows": [7],
        "query_start_loc": [0, 1],
        "seq_lens": [10],
        "table_start": [[0, 2]],
        "blocks": [6, 8],
    }
    # position 9 reads from 5 on, so from the page of positions 4..7
    prepare_plan(plan_of(**one, first_positions=[[4]]), [sliding], [10])
    with pytest.raises(InvalidPlan, match=r"row 7 covers positions 8\.\..* reads from 5 on"):
        prepare_plan(plan_of(**one, first_positions=[[8]]), [sliding], [10])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": [9, 4, 10, 8, 5]}, r"blocks must lie in 2\.\.9, but contain \[10\]"),
        ({"blocks": [9, 4, 1, 8, 5]}, r"blocks must lie in 2\.\.9, but contain \[1\]"),
        ({"blocks": [9, 4, -1, 8, 5]}, r"but contain \[-1\]"),
        ({"seq_lens": [13, 6]}, r"row 7 covers positions 0\.\.11 .* computes 12\.\.12"),
        ({"seq_lens": [10, 3]}, r"lengths \[1, 4\] .* seq_lens \[10, 3\]"),
        ({"first_positions": [[4, 0]]}, r"row 7 covers positions 4\.\.15 .* reads from 0 on"),
        ({"first_positions": [[2, 0]]}, r"row 7 covers positions 2\.\.13 in pages of 4"),
        ({"query_start_loc": [0, 1, 4]}, r"query_start_loc is \[0, 1, 4\]"),
        ({"query_start_loc": [0, 0, 5]}, r"queries have lengths \[0, 5\]"),
        ({"logits_indices": [5]}, r"logits_indices must lie in 0\.\.4"),
        ({"copy": [[0, 4, 10]]}, r"copy from block 4 to 10 leaves the blocks 2\.\.9"),
        ({"copy": [[0, 1, 4]]}, r"copy from block 1 to 4 leaves"),
        ({"copy": [[1, 4, 5]]}, r"copy names cache group 1 of 1"),
        ({"swap_out": [[0, 4, 3]]}, r"swap_out from block 4 to 3 leaves the swap blocks 0\.\.2"),
        ({"swap_out": [[0, 1, 0]]}, r"swap_out from block 1 to 0 leaves the blocks 2\.\.9"),
        ({"swap_in": [[0, -1, 4]]}, r"swap_in from block -1 to 4 leaves the swap blocks"),
        ({"swap_in": [[0, 2, 10]]}, r"swap_in from block 2 to 10 leaves the blocks 2\.\.9"),
        ({"table_start": [[0, 3, 6]]}, r"table_start is \[0, 3, 6\]; .* 5 block table entries"),
        ({"table_start": [[-2, 3, 5]]}, r"table_start is \[-2, 3, 5\]"),
        ({"table_start": [[0, 6, 5]]}, r"table_start is \[0, 6, 5\]"),
        ({"sample_logits": [1]}, r"sample_logits must lie in 0\.\.0"),
        ({"rows": [7, 8]}, r"rows must lie in 0\.\.7, but contain \[8\]"),
        ({"token_ids": [-2, 11, 12, 13, 300]}, r"token_ids .* contain \[-2, 300\]"),
        ({"blocks": [5] * 17}, "blocks has 17 entries; allowed: 16"),
        ({"init_rows": [0] * 9}, "init_rows has 9 entries; allowed: 8"),
        ({"logits_indices": [0] * 6}, "logits_indices has 6 entries; allowed: 5"),
        ({"sample_logits": [0] * 13, "sample_rows": [7] * 13}, "sample_rows has 13 entries.*: 12"),
        ({"num_candidates": [291]}, r"num_candidates must lie in -1\.\.290, but contain \[291\]"),
        ({"num_candidates": [-2]}, r"num_candidates .* contain \[-2\]"),
        ({"num_candidates": [41]}, "ask for 42 entries; allowed: 40"),
        ({"is_beam": [2]}, r"is_beam must lie in 0\.\.1, but contain \[2\]"),
        ({**SCORE, "score_logits": [1]}, r"score_logits must lie in 0\.\.0, but contain \[1\]"),
        ({**SCORE, "score_logits": [-1]}, r"score_logits .* contain \[-1\]"),
        ({**SCORE, "score_tokens": [300]}, r"score_tokens must lie in 0\.\.299"),
        ({**SCORE, "score_tokens": [-1]}, r"score_tokens must lie in 0\.\.299"),
        ({**SCORE, "score_candidates": [-1]}, r"score_candidates must lie in 0\.\.290"),
        ({**SCORE, "score_candidates": [291]}, r"score_candidates must lie in 0\.\.290"),
        ({**SCORE, "score_candidates": [40]}, "ask for 41 entries; allowed: 40"),
        ({name: values * 13 for name, values in SCORE.items()}, "score_logits has 13 .*: 12"),
        ({**HISTORY, "history_tokens": [300, 5]}, r"history_tokens must lie in -1\.\.299"),
        ({**HISTORY, "history_tokens": [-2, 5]}, r"history_tokens .* contain \[-2\]"),
        ({**HISTORY, "history_tokens": [-1, -1]}, "name the unknown token .* more than once"),
        ({**HISTORY, "history_counts": [0, -1]}, r"history_counts must lie in 0\.\."),
        ({**HISTORY, "history_start": [0, 1]}, r"history_start is \[0, 1\]; .* 2 history entries"),
        ({**HISTORY, "history_start": [-2, 2]}, r"history_start is \[-2, 2\]"),
        ({**HISTORY, "repetition_penalty": [0.0]}, r"repetition_penalty .* above 0, .* \[0\.0\]"),
        ({**HISTORY, "frequency_penalty": [np.nan]}, r"frequency_penalty .* is \[nan\]"),
        ({**HISTORY, "presence_penalty": [np.inf]}, r"presence_penalty .* is \[inf\]"),
        ({"u": [1.0]}, r"u must lie from 0 to below 1, but is \[1\.0\]"),
        ({"u": [-0.5]}, "u must lie"),
        ({"u": [np.nan]}, "u must lie"),
        ({"temperature": [-1.0]}, r"temperature must be 0 \(greedy\), .* is \[-1\.0\]"),
        ({"temperature": [np.nan]}, "temperature must be"),
        ({"top_k": [-1]}, "top_k must be at least 0"),
        ({"top_p": [0.0]}, "top_p must be above 0"),
        ({"min_p": [1.5]}, "min_p must be 0 to 1"),
        ({**BIAS, "bias_tokens": [300]}, r"bias_tokens must lie in 0\.\.299, but contain \[300\]"),
        ({**BIAS, "bias_tokens": [-1]}, r"bias_tokens must lie in 0\.\.299"),
        ({**BIAS, "bias_after": [300]}, r"bias_after must lie in -1\.\.299"),
        ({**BIAS, "bias_after": [-2]}, r"bias_after must lie in -1\.\.299"),
        ({**BIAS, "bias": [np.inf]}, r"bias must be finite or -inf, but contains \[inf\]"),
        ({**BIAS, "bias": [np.nan]}, r"bias must be finite or -inf, but contains \[nan\]"),
        ({**BIAS, "bias_start": [0, 0]}, r"bias_start is \[0, 0\]; .* 1 bias entries"),
        (
            {"table_start": [[0, 3, 5], [4, 4, 5]], "first_positions": [[0, 0]] * 2},
            "2 cache groups",
        ),
    ],
    ids=str,
)
def test_contradictions_are_refused(changes, message):
    """The kernel indexes raw memory: what it gets must have been checked."""
    with pytest.raises(InvalidPlan, match=message):
        prepare(**changes)


@pytest.mark.parametrize("changes", [SCORE, HISTORY, BIAS, {"num_candidates": [39]}], ids=str)
def test_what_is_just_inside_the_bounds_is_allowed(changes):
    """The refusals above are of what they name."""
    assert prepare(**changes).num_tokens == 5


def test_groups_must_match_the_model():
    """A plan for another model's groups must not be run."""
    plan = plan_of(table_start=np.zeros((2, 1)), first_positions=np.zeros((2, 0)))
    with pytest.raises(InvalidPlan, match="tables of 2 cache groups; the model has 1"):
        prepare_plan(plan, [FULL], [10])
