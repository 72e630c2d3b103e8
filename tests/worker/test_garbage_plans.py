"""Plans of random numbers: a worker answers them or refuses them, and goes on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from protos import link_pb2
from protos.plan import StepPlan
from protos.sampling import MIN_TEMPERATURE, SAMPLER_FIELDS
from tests.support.plan_builder import plan_of
from tests.support.tiny_models import VOCAB_SIZE, llama
from worker.batch.plan_values import InvalidPlan
from worker.step.ragged_buffer import FIRST_BYTES

NUM_PLANS = 150
_RIGHT = {
    "token_ids": [1, 2, 3, 4, 5, 6],
    "rows": [0, 3],
    "query_start_loc": [0, 2, 6],
    "seq_lens": [2, 4],
    "table_start": [[0, 1, 2]],
    "blocks": [4, 5],
}


def garbage(rng: np.random.Generator) -> StepPlan:
    """A right forward with samples and scores of numbers that are mostly, but not always, inside
    their bounds."""

    def numbers(first: int, last: int, count: int) -> np.ndarray:
        values = rng.integers(first, last + 1, count)
        if rng.random() < 0.04:
            values = rng.integers(-(2**31), 2**31, count)
        return values.astype(np.int32)

    def offsets(count: int, total: int) -> np.ndarray:
        cuts = np.sort(rng.integers(0, total + 1, max(count - 1, 0)))
        return np.concatenate([[0], cuts, [total]])[: count + 1] if count else np.array([0])

    logits, samples, scores, history, biases = rng.integers(1, 6, 5).tolist()
    samples, history, biases = (0, 0, 0) if rng.random() < 0.1 else (samples, history, biases)
    extremes = {
        "temperature": [0.0, MIN_TEMPERATURE, 1.0, 3e38],
        "top_k": [0, 1, 5, 2**31 - 1],
        "top_p": [1e-38, 0.5, 1.0],
        "min_p": [0.0, 1e-38, 1.0],
        "repetition_penalty": [1e-38, 0.5, 1.0, 3e38],
        "frequency_penalty": [-2.0, 0.0, 2.0],
        "presence_penalty": [-2.0, 0.0, 2.0],
    }
    assert extremes.keys() == SAMPLER_FIELDS.keys()
    wrong = [-1.0, np.nan, np.inf, -np.inf]
    parameters = {
        name: rng.choice(wrong if rng.random() < 0.02 and name != "top_k" else values, samples)
        for name, values in extremes.items()
    }
    u = [0.0, 0.5, 1 - 2**-24] if rng.random() < 0.95 else [1.0, 2.0, np.nan]
    return plan_of(
        **_RIGHT,
        **parameters,
        logits_indices=numbers(0, 5, logits),
        sample_logits=numbers(0, logits - 1, samples),
        sample_rows=numbers(0, 3, samples),
        u=rng.choice(u, samples),
        num_candidates=numbers(-1, VOCAB_SIZE, samples),
        is_beam=numbers(0, 1, samples),
        score_logits=numbers(0, logits - 1, scores),
        score_tokens=numbers(0, VOCAB_SIZE - 1, scores),
        score_candidates=numbers(0, VOCAB_SIZE, scores),
        history_start=offsets(samples, history),
        history_tokens=numbers(-1, VOCAB_SIZE - 1, history),
        history_counts=numbers(0, 9, history),
        bias_start=offsets(samples, biases),
        bias_tokens=numbers(0, VOCAB_SIZE - 1, biases),
        bias_after=numbers(-1, VOCAB_SIZE - 1, biases),
        bias=rng.choice([-np.inf, 3e38, -3e38, 1.0], biases),
    )


def garbage_mask(rng: np.random.Generator, num_samples: int) -> link_pb2.Mask:
    count = int(rng.integers(0, num_samples + 2))
    indices = np.sort(rng.integers(0, num_samples + 1, count))
    if rng.random() < 0.7:
        indices = np.unique(indices[indices < num_samples])
    words = [rng.bytes(int(rng.choice([28, 28, 28, 4, 3, 60]))) for _ in indices]
    return link_pb2.Mask(step_id=1, sample_indices=indices.tolist(), words=words)


def test_random_plans_are_answered_or_refused(served) -> None:
    """What is out of bounds reads another request's memory, or ends the process on a device; what
    is inside must be answered, with valid ids."""
    it = served(llama)
    rng = np.random.default_rng(7)
    answered = refused = 0
    for _ in range(NUM_PLANS):
        plan = garbage(rng)
        mask = garbage_mask(rng, len(plan.sample_rows))
        plan = replace(plan, awaits_mask=bool(rng.random() < 0.5))
        try:
            result = it.runner.launch(plan, lambda mask=mask: mask).wait()
        except InvalidPlan:
            refused += 1
            continue
        answered += 1
        assert len(result.token_ids) == len(plan.sample_rows)
        ks = [*plan.num_candidates[plan.num_candidates >= 0], *plan.score_candidates]
        assert len(result.ranks) == len(ks)
        assert len(result.candidate_ids) == len(result.logprobs) == sum(ks) + len(ks)
        for ids in (result.token_ids, result.candidate_ids):
            assert ((ids >= 0) & (ids < VOCAB_SIZE)).all()
        assert result.is_finite.tolist() == [1, 1]
    assert min(answered, refused) > NUM_PLANS // 5, (answered, refused)
    right = plan_of(**_RIGHT, logits_indices=[1, 5], sample_logits=[0, 1], sample_rows=[0, 3])
    fresh = served(llama).step(right).token_ids.tolist()
    assert it.step(right).token_ids.tolist() == fresh


@pytest.mark.parametrize("length", [3000, 70_000])
def test_long_histories_grow_their_buffer(served, length: int) -> None:
    """Nobody can bound them; what was there for smaller steps must not cut or corrupt them."""
    it = served(llama)
    tokens = np.tile(np.arange(1, VOCAB_SIZE), -(-length // (VOCAB_SIZE - 1)))[:length]
    plan = plan_of(
        **_RIGHT,
        logits_indices=[1, 5],
        sample_logits=[0, 1],
        sample_rows=[0, 3],
        bias_start=[0, length, length + 1],
        bias_tokens=[*tokens, 7],
        bias_after=np.full(length + 1, -1),
        bias=[*np.full(length, -np.inf), 1e6],
    )
    rights = [it.step(plan).token_ids.tolist() for _ in range(3)]  # both sets, and one again
    assert rights == 3 * [[0, 7]]
    assert it.runner._sets[0].inputs._ragged.num_bytes > FIRST_BYTES
