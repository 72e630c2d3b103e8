"""Plans made by hand, for steps that the scheduler would not plan. It keeps no state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from protos.plan import NO_CANDIDATES, PLAN_LAYOUT, Int32, StepPlan
from protos.sampling import SAMPLER_FIELDS

COMPUTED: Final = (
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
        "query_start_loc": [0],
        "u": np.zeros(samples),
        "num_candidates": np.full(samples, NO_CANDIDATES),
        "is_beam": np.zeros(samples),
        "history_start": np.zeros(samples + 1),
        "bias_start": np.zeros(samples + 1),
        **{name: np.full(samples, entry.neutral) for name, entry in SAMPLER_FIELDS.items()},
        "temperature": np.zeros(samples),
        "table_start": np.zeros((1, len(arrays.get("rows", ())) + 1)),
        "first_positions": np.zeros((1, len(arrays.get("rows", ())))),
        **arrays,
    }
    filled = {name: np.asarray(values.get(name, []), dtype) for name, dtype, _ in PLAN_LAYOUT}
    return StepPlan.from_arrays(step_id, False, filled)


def with_samples(
    plan: StepPlan,
    logits_indices: Sequence[int],
    sample_logits: Sequence[int],
    sample_rows: Sequence[int],
) -> StepPlan:
    """The same forward with other samples, all of them greedy; nothing is moved before it."""
    return plan_of(
        plan.step_id,
        **{name: getattr(plan, name) for name in COMPUTED},
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
