"""Sampling never waits for the device: it runs here on tensors that have no values.

Whatever would read one (`item`, `nonzero`, a boolean index, a copy to the host) raises on torch's
meta device, which takes the same paths as CUDA.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.support.sampled_steps import Case, plan_of_cases, sample_on
from worker.step.sample_inputs import prepare_samples
from worker.step.sampler import SampleRows, sample

VOCAB = 700
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "truncated": {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 1.0},
}


def cases() -> list[Case]:
    made = []
    for place, settings in enumerate(SETTINGS.values()):
        case = Case(settings=settings, num_candidates=place * 3 - 1)
        made += [case, Case(**{**vars(case), "bias": [(3, 1.0), (4, -math.inf)], "prompt": [1, 2],
                               "output": [5, 6], "run_ahead": True})]  # fmt: skip
    return [*made, Case(is_beam=True, num_candidates=8, bias=[(7, -math.inf)])]


@pytest.mark.parametrize("at_once", [100, 4])
@pytest.mark.parametrize("is_masked", [False, True])
def test_nothing_in_sampling_reads_a_value(at_once: int, is_masked: bool) -> None:
    """One such read in a step, and the device idles while the host prepares the next."""
    count = len(cases())
    plan = plan_of_cases(
        cases(),
        sample_rows=np.arange(count) // 2,  # several samples of a row
        sample_logits=np.arange(count)[::-1],
        score_logits=[1, 3, 2],
        score_tokens=[5, 6, 7],
        score_candidates=[0, 20, 4],
    )
    inputs = prepare_samples(plan, VOCAB, at_once)
    logits = torch.empty(count, VOCAB, dtype=torch.bfloat16, device="meta")
    masks = {1: [4], 5: range(9)} if is_masked else None
    tokens, answers = sample_on(logits, plan, inputs, masks=masks)
    assert (tokens.device.type, tokens.shape) == ("meta", (count,))
    assert sum(len(answer.ranks) for answer in answers) == inputs.num_answers
    assert sum(len(answer.ids) for answer in answers) == inputs.num_entries
    assert sum(len(answer.logprobs) for answer in answers) == inputs.num_entries


def test_reading_a_value_would_be_noticed() -> None:
    """Else the test above proves nothing."""

    def reads(logits: torch.Tensor, samples: SampleRows) -> torch.Tensor:
        tokens = sample(logits, samples)
        return tokens + (logits > 0).nonzero().shape[0]

    plan = plan_of_cases(cases())
    inputs = prepare_samples(plan, VOCAB, 100)
    with pytest.raises(RuntimeError):  # NotImplementedError is one
        sample_on(torch.empty(len(cases()), VOCAB, device="meta"), plan, inputs, sample=reads)
