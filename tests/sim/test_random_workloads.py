"""The core under thousands of seeded random requests; every token is checked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.random_requests import random_requests
from tests.support.simulation import Outcome, Setup, run_workload

FULL, HYBRID, SLIDING = ((0, 1),), ((0, 2), (9, 3)), ((7, 1),)
SETUPS = {
    "ample": Setup(num_blocks=200),
    "no_sharing": Setup(num_blocks=40, allow_block_sharing=False),
    "tiny_pool": Setup(num_blocks=18, max_model_len=64),
    "tiny_pool_swap": Setup(num_blocks=18, max_model_len=64, swap_chunks=30),
    "tiny_pool_small_swap": Setup(num_blocks=18, max_model_len=64, swap_chunks=6),
    "one_request_fills_it": Setup(num_blocks=16, max_model_len=64, safety_margin=0.0),
    "big_pages": Setup(num_blocks=12, page_size=16),
    "page_of_one": Setup(num_blocks=90, page_size=1, max_model_len=64),
    "small_budget": Setup(max_batch_tokens=8, max_requests=8),
    "budget_of_five": Setup(max_batch_tokens=5, max_requests=5, num_blocks=17),
    "cache_budget": Setup(cache_budget=20),
    "target_step": Setup(target_step_ms=1.0),
    "target_step_tiny_pool": Setup(target_step_ms=1.0, num_blocks=18, max_model_len=64),
    "chunks_of_four": Setup(num_blocks=6, groups=((0, 4),), max_model_len=64),
    "five_rows": Setup(max_requests=5),
    "sliding": Setup(num_blocks=30, groups=SLIDING),
    "sliding_tiny": Setup(num_blocks=8, groups=SLIDING, swap_chunks=4),
    "hybrid": Setup(num_blocks=60, groups=HYBRID),
    "hybrid_tiny": Setup(num_blocks=12, groups=HYBRID, max_model_len=64),
    "hybrid_tiny_swap": Setup(num_blocks=12, groups=HYBRID, max_model_len=64, swap_chunks=10),
    "hybrid_three": Setup(num_blocks=40, groups=((0, 1), (5, 1), (13, 1)), swap_chunks=10),
    "prefill_first": Setup(num_blocks=24, policy="prefill_first", max_model_len=64),
    "priority": Setup(num_blocks=24, policy="priority", max_model_len=64),
    "priority_swap": Setup(num_blocks=24, policy="priority", max_model_len=64, swap_chunks=20),
    "static": Setup(num_blocks=60, policy="static", max_model_len=64),
    "static_hybrid": Setup(num_blocks=60, groups=HYBRID, policy="static", max_model_len=64),
}
# what a setup must have made happen, or it shows nothing
MUST_SHOW = {
    "tiny_pool": ("soft_resets",),
    "tiny_pool_swap": ("offloads", "restores"),
    "tiny_pool_small_swap": ("offloads", "restores", "soft_resets"),
    "hybrid_tiny": ("soft_resets",),
    "hybrid_tiny_swap": ("offloads", "restores"),
    "priority": ("soft_resets",),
    "priority_swap": ("offloads", "restores"),
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", SETUPS)
def test_every_request_gets_its_own_tokens(name: str, depth: int) -> None:
    """Wrong tables, slots, lengths or chunk edges, a lost or doubled end, a wedge, a leak."""
    setup = replace(SETUPS[name], max_plans_in_flight=depth)
    outcomes: list[Outcome] = []
    for seed in range(1 if depth == 1 else 2):
        requests = random_requests(
            np.random.default_rng(seed),
            50,
            vocab_size=setup.vocab_size,
            prefixes=3,
            fork_share=0.0 if setup.policy == "static" else 0.2,
            priorities=3,
        )
        outcomes.append(run_workload(setup, requests, seed=seed, abort_share=0.2))
    for counter in MUST_SHOW.get(name, ()):
        assert sum(getattr(outcome.counters, counter) for outcome in outcomes), counter
    if setup.policy == "static":
        return
    assert sum(outcome.forks for outcome in outcomes)
    assert sum(outcome.tail_copies for outcome in outcomes) or setup.page_size == 1
    hits = sum(sum(outcome.cached_tokens.values()) for outcome in outcomes)
    if setup.page_size < 16:  # else prompts are too short for a block in common
        assert bool(hits) == setup.allow_block_sharing
