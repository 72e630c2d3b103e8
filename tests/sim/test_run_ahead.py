"""Run-ahead and its plain twin: one plan or two without a result, results in any legal timing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.request import FinishReason
from tests.support.any_timing import run_in_any_timing
from tests.support.random_requests import random_requests
from tests.support.simulation import Outcome, Setup, Simulation, run_workload, verify

HYBRID = ((0, 2), (9, 3))
TIGHT = Setup(num_blocks=18, max_model_len=64, max_requests=6, vocab_size=20)
SETUPS = {
    "full": TIGHT,
    "swap": replace(TIGHT, swap_chunks=30),
    "small_swap": replace(TIGHT, swap_chunks=5),
    "sliding": replace(TIGHT, num_blocks=16, groups=((7, 1),), swap_chunks=10),
    "hybrid": replace(TIGHT, num_blocks=12, groups=HYBRID, swap_chunks=10),
    "small_budget": replace(TIGHT, max_batch_tokens=7, swap_chunks=10),
    "priority": replace(TIGHT, policy="priority", swap_chunks=20),
    "prefill_first": replace(TIGHT, policy="prefill_first", swap_chunks=20),
    "static": replace(TIGHT, policy="static", num_blocks=60),
}


def run(setup: Setup, seed: int, count: int) -> tuple[Outcome, Counter[str]]:
    requests = random_requests(
        np.random.default_rng(seed),
        count,
        vocab_size=setup.vocab_size,
        prefixes=3,
        fork_share=0.0 if setup.policy == "static" else 0.25,
        priorities=3,
    )
    return run_in_any_timing(setup, requests, seed)


def both_depths(setup: Setup, seed: int, count: int) -> list[Outcome]:
    """The same requests with one plan in flight and with two; equal tokens, whatever happened."""
    plain, _ = run(replace(setup, max_plans_in_flight=1), seed, count)
    ahead, seen = run(replace(setup, max_plans_in_flight=2), seed, count)
    assert seen["ahead"], "nothing was planned ahead"
    for who, reason in plain.reasons.items():
        if FinishReason.ABORT not in (reason, ahead.reasons[who]):
            assert plain.tokens[who] == ahead.tokens[who], who
    return [plain, ahead]


def assert_preempted(setup: Setup, outcomes: list[Outcome]) -> None:
    counters = [outcome.counters for outcome in outcomes]
    if setup.swap_chunks:
        assert sum(c.offloads for c in counters)
        assert sum(c.restores for c in counters)
    else:
        assert sum(c.soft_resets for c in counters)


@pytest.mark.parametrize("name", [name for name in SETUPS if name != "static"])
@pytest.mark.parametrize("overlaps_swap", [False, True], ids=["in_line", "overlapped"])
def test_any_timing_gives_the_same_tokens(name: str, overlaps_swap: bool) -> None:
    """A result that comes late finds another tenant in its row, a block reused too early, an
    ended request planned again, or a wedge that only a certain order of events shows."""
    setup = replace(SETUPS[name], overlaps_swap=overlaps_swap)
    if overlaps_swap and not setup.swap_chunks:
        pytest.skip("nothing to overlap without a swap pool")
    assert_preempted(setup, both_depths(setup, seed=11, count=30))


def test_any_timing_of_static_batches() -> None:
    """The same for the policy that computes ended rows on."""
    both_depths(SETUPS["static"], seed=102, count=40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SETUPS)
def test_many_timings_give_the_same_tokens(name: str) -> None:
    """The same with many seeds: rare orders of events."""
    for seed in range(25):
        for overlaps_swap in (False, True):
            both_depths(replace(SETUPS[name], overlaps_swap=overlaps_swap), seed, 40)


@pytest.mark.parametrize("depth", [1, 2])
def test_overlapped_swap_takes_as_little_as_in_line(depth: int) -> None:
    """Blocks in quarantine are not waited for, and more requests are swapped out in their place;
    or nobody is offloaded any more."""
    requests = random_requests(
        np.random.default_rng(2), 50, prompt=(8, 32), vocab_size=50, stop_share=0.0
    )
    setup = Setup(
        num_blocks=40, max_model_len=64, swap_chunks=60, max_requests=12, max_plans_in_flight=depth
    )
    in_line = run_workload(setup, requests, seed=1).counters
    overlapped = run_workload(replace(setup, overlaps_swap=True), requests, seed=1).counters
    assert overlapped.offloads > 5
    assert overlapped.offloads + overlapped.soft_resets <= 1.3 * (
        in_line.offloads + in_line.soft_resets
    )


def test_a_block_reused_too_early_is_noticed() -> None:
    """The tests above pass whatever the scheduler does about blocks that are being copied."""
    requests = random_requests(np.random.default_rng(2), 60, prompt=(8, 32), vocab_size=50)
    setup = Setup(num_blocks=18, max_model_len=64, swap_chunks=60, max_plans_in_flight=2)

    sim = Simulation(setup, seed=1)
    sim.worker.overlaps_swap = True  # and the scheduler does not know
    for new in requests:
        sim.submit(new)
    while sim.state.requests:
        sim.turn()
    with pytest.raises(AssertionError, match=r"r[0-9]"):
        verify(requests, sim.outcome, setup)
