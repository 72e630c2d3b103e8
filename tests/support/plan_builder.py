"""Plans made by hand, for steps that the scheduler would not plan. It keeps no state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from protos.plan import PLAN_LAYOUT, Int32, StepPlan

_COMPUTED: Final = (
    "token_ids", "rows", "query_start_loc", "seq_lens", "table_start", "first_positions", "blocks",
)  # fmt: skip


def plan_of(step_id: int = 1, **arrays: Any) -> StepPlan:
    """A plan with the given arrays, of one cache group unless `table_start` has more; the others
    are empty or off."""
    samples = len(arrays.get("sample_logits", ()))
    values: dict[str, Any] = {
        "swap_out": np.zeros((0, 3)),
        "swap_in": np.zeros((0, 3)),
        "copy": np.zeros((0, 3)),
        "init_history_start": np.zeros(len(arrays.get("init_rows", ())) + 1),
        "query_start_loc": [0],
        "bias_start": np.zeros(samples + 1),
        "temperature": np.zeros(samples),
        "top_k": np.zeros(samples),
        "top_p": np.ones(samples),
        "min_p": np.zeros(samples),
        "u": np.zeros(samples),
        "repetition_penalty": np.ones(samples),
        "frequency_penalty": np.zeros(samples),
        "presence_penalty": np.zeros(samples),
        "num_logprobs": np.full(samples, -1),
        "table_start": np.zeros((1, len(arrays.get("rows", ())) + 1)),
        "first_positions": np.zeros((1, len(arrays.get("rows", ())))),
        **arrays,
    }
    return StepPlan(
        step_id=step_id,
        awaits_mask=values.pop("awaits_mask", False),
        **{name: np.asarray(values.get(name, []), dtype) for name, dtype, _ in PLAN_LAYOUT},
    )


def with_samples(
    plan: StepPlan,
    logits_indices: Sequence[int],
    sample_logits: Sequence[int],
    sample_rows: Sequence[int],
) -> StepPlan:
    """The same forward with other samples, all of them greedy; nothing is moved before it."""
    return plan_of(
        plan.step_id,
        **{name: getattr(plan, name) for name in _COMPUTED},
        logits_indices=logits_indices,
        sample_logits=sample_logits,
        sample_rows=sample_rows,
    )


def blocks_of(plan: StepPlan, row: int, group: int = 0) -> list[int]:
    """The block table of a row that the plan computes."""
    (place,) = np.flatnonzero(plan.rows == row)
    start = plan.table_start[group]
    blocks: Int32 = plan.blocks[start[place] : start[place + 1]]
    return blocks.tolist()
