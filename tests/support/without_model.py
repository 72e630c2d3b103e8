"""Results of steps that nobody computed: for tests of the scheduler alone."""

from __future__ import annotations

import numpy as np

from protos.plan import StepPlan, StepResult


def without_model(plan: StepPlan) -> StepResult:
    """Token 0 for every sample, and every row finite."""
    samples = len(plan.sample_logits)
    nothing = np.zeros(0, np.int32)
    return StepResult(
        plan.step_id, 0, 0, np.zeros(samples, np.int32), np.ones(len(plan.rows), np.int32),
        np.zeros(samples, np.float32), np.zeros(samples, np.int32),
        np.zeros(samples + 1, np.int32), nothing, nothing.astype(np.float32),
    )  # fmt: skip
