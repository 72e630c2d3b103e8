"""Many requests through the core: 5,000 in `make test`, 100,000 in `make test-slow`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.random_requests import random_requests
from tests.support.simulation import Setup, run_workload

CROWDED = Setup(
    num_blocks=330,
    page_size=4,
    max_batch_tokens=256,
    max_requests=64,
    max_model_len=64,
    max_plans_in_flight=2,
    vocab_size=200,
    safety_margin=0.0,  # so that it is short
)


def run(count: int, show: Callable[[str], None]) -> None:
    """16 tokens in and out on average; the pool holds about half of what 64 rows want."""
    rng = np.random.default_rng(count)
    requests = random_requests(
        rng, count, prompt=(1, 31), output=(1, 31), vocab_size=CROWDED.vocab_size, stop_share=0.1
    )
    outcome = run_workload(CROWDED, requests, seed=1, arrivals_per_turn=4.0, abort_share=0.05)
    show(
        f"{count} requests in {outcome.steps} steps, {outcome.counters.soft_resets} soft resets, "
        f"{outcome.mixed_steps} mixed steps, at most {outcome.most_running} at once"
    )
    assert outcome.counters.soft_resets > count / 1000, "the pool was never short"
    assert outcome.mixed_steps > count / 100
    assert not outcome.refused


def test_five_thousand_requests(show: Callable[[str], None]) -> None:
    """A rare interleaving of arrivals, aborts, chunks and resets that breaks one token."""
    run(5_000, show)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_requests(show: Callable[[str], None]) -> None:
    """The same at the size where one-in-a-million interleavings show."""
    run(100_000, show)
