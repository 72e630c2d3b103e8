"""A worker's answer without a model: where what is generated does not matter."""

from __future__ import annotations

import numpy as np

from protos.plan import NO_CANDIDATES, StepPlan, StepResult


def without_model(plan: StepPlan) -> StepResult:
    """Answers with token 0; every reported token is certain, and all candidates are token 0."""
    samples, rows = len(plan.sample_logits), len(plan.rows)
    reported = plan.num_candidates[plan.num_candidates != NO_CANDIDATES]
    if not len(reported) + len(plan.score_tokens):
        token_ids, is_finite = np.zeros(samples, np.int32), np.ones(rows, np.int32)
        return StepResult(plan.step_id, 0, 0, token_ids, is_finite)
    sizes = np.concatenate([reported, plan.score_candidates]) + np.int32(1)
    candidate_ids = np.zeros(sizes.sum(), np.int32)
    begins = sizes.cumsum() - sizes
    candidate_ids[begins[len(reported) :]] = plan.score_tokens
    return StepResult(
        plan.step_id, 0, 0, np.zeros(samples, np.int32), np.ones(rows, np.int32),
        ranks=np.ones(len(sizes), np.int32),
        candidate_ids=candidate_ids,
        logprobs=np.zeros(len(candidate_ids), np.float32),
    )  # fmt: skip
