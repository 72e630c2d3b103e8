"""A worker's answer without a model: where what is generated does not matter."""

from __future__ import annotations

import numpy as np

from protos.plan import StepPlan, StepResult


def without_model(plan: StepPlan) -> StepResult:
    """Answers with token 0."""
    samples, rows = len(plan.sample_logits), len(plan.rows)
    return StepResult(plan.step_id, 0, 0, np.zeros(samples, np.int32), np.ones(rows, np.int32))
