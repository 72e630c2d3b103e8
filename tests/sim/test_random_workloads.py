"""The core under thousands of seeded random requests; every token is checked."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sim.workload import Setup, random_requests, run_workload

SETUPS = {
    "ample": Setup(num_blocks=200),
    "tiny_pool": Setup(num_blocks=18, max_model_len=64),
    "one_request_fills_it": Setup(num_blocks=16, max_model_len=64, safety_margin=0.0),
    "big_pages": Setup(num_blocks=12, page_size=16),
    "page_of_one": Setup(num_blocks=90, page_size=1, max_model_len=64),
    "small_budget": Setup(max_batch_tokens=8, max_requests=8),
    "budget_of_three": Setup(max_batch_tokens=3, max_requests=3, num_blocks=17),
    "cache_budget": Setup(cache_budget=20),
    "chunks_of_four": Setup(num_blocks=24, blocks_per_chunk=4, max_model_len=64),
    "one_row": Setup(max_requests=1),
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", SETUPS)
def test_every_request_gets_its_own_tokens(name: str, depth: int) -> None:
    """Wrong tables, slots, lengths or chunk edges, a lost or doubled end, a wedge, a leak."""
    from dataclasses import replace

    setup = replace(SETUPS[name], max_plans_in_flight=depth)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        requests = random_requests(rng, 60, vocab_size=setup.vocab_size)
        run_workload(setup, requests, seed=seed, abort_share=0.2)
