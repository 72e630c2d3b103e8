"""Refuses values of a plan that would address what does not exist, or ask for what does not yet.

On a device such a value would be an assertion that ends the process, or a silent wrong read.
"""

from __future__ import annotations

import numpy as np

from protos.plan import UNKNOWN_TOKEN, StepPlan
from worker.batch.inputs import InvalidPlan


def check_values(plan: StepPlan, num_rows: int, num_embeddings: int) -> None:
    """Raises InvalidPlan for a row or a token id out of range."""
    # samples may name rows that compute nothing yet: siblings that are forked off
    bounds = dict.fromkeys(("rows", "init_rows", "sample_rows"), (0, num_rows - 1))
    bounds["token_ids"] = (UNKNOWN_TOKEN, num_embeddings - 1)
    for name, (first, last) in bounds.items():
        values = getattr(plan, name)
        if len(values) and not (values.min() >= first and values.max() <= last):
            odd = values[(values < first) | (values > last)]
            raise InvalidPlan(f"{name} must lie in {first}..{last}, but hold {odd.tolist()}")


def refuse_later_features(plan: StepPlan) -> None:
    """Raises ValueError for what a later version of the worker will compute."""
    later = {
        "init_history (penalties)": len(plan.init_history),
        "repetition_penalty": np.count_nonzero(plan.repetition_penalty != 1),
        "frequency_penalty": np.count_nonzero(plan.frequency_penalty),
        "presence_penalty": np.count_nonzero(plan.presence_penalty),
        "logprobs": np.count_nonzero(plan.num_logprobs >= 0),
        "logit_bias": len(plan.bias_tokens),
        "scores (prompt_logprobs)": len(plan.score_logits),
        "a grammar mask": int(plan.awaits_mask),
    }
    for name, count in later.items():
        if count:
            raise ValueError(f"step {plan.step_id} asks for {name}, which this worker lacks so far")
