"""The cache budget of a step: what counts, and who is left out."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.request import NewRequest
from tests.support.random_requests import random_requests
from tests.support.simulation import Key, Setup, Simulation, key, run_workload
from tests.support.without_model import without_model

PREFIX = list(range(64))


def simulation(**changes: object) -> Simulation:
    defaults: dict[str, object] = {
        "num_blocks": 60,
        "max_batch_tokens": 128,
        "max_requests": 16,
        "safety_margin": 0.0,
    }
    return Simulation(Setup(**{**defaults, **changes}))  # type: ignore[arg-type]


def longest_gaps(sim: Simulation) -> tuple[dict[Key, int], list[int]]:
    """Steps between two tokens of each answer, at most; and the number of rows of each step."""
    sim.worker.step = without_model  # type: ignore[method-assign]
    last: dict[Key, int] = {}
    gaps: dict[Key, int] = defaultdict(int)
    sizes: list[int] = []
    while sim.state.requests:
        assert sim.plan()
        step = sim.state.in_flight[-1]
        sizes.append(len(step.rows))
        for place in step.sampled_for.tolist():
            who = key(step.requests[place])
            gaps[who] = max(gaps[who], len(sizes) - last.get(who, len(sizes)))
            last[who] = len(sizes)
        sim.absorb()
    return gaps, sizes


@pytest.mark.parametrize("budget", [0, 60], ids=["default", "the_pool"])
@pytest.mark.parametrize("n", [1, 16], ids=["prefix", "siblings"])
def test_a_shared_page_counts_once(n: int, budget: int) -> None:
    """Requests that share most of what they read run few at a time, for want of a budget that
    none of them uses up."""
    sim = simulation(cache_budget=budget)
    for number in range(16 // n):
        sim.submit(NewRequest(f"r{number}", [*PREFIX, number, 1], 7, n=n))
    gaps, sizes = longest_gaps(sim)
    assert max(gaps.values()) == 1
    assert max(sizes) == 16
    assert sim.state.counters.soft_resets == 0


def test_by_default_whatever_the_pool_holds_is_read() -> None:
    """Other groups' windows, shared pages or tails restrict what the memory has room for."""
    setup = Setup(num_blocks=60, groups=((0, 2), (9, 3)), max_model_len=64)
    requests = random_requests(np.random.default_rng(3), 30, prefixes=2, fork_share=0.3)
    free, whole = (
        run_workload(replace(setup, cache_budget=budget), requests, keep_trace=True)
        for budget in (0, 10**6)
    )
    assert free.trace == whole.trace


@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "priority"])
def test_rows_that_find_no_place_take_turns(policy: str) -> None:
    """Whoever came first reads the whole budget in every step, and the others stand still."""
    sim = simulation(cache_budget=12, policy=policy, num_blocks=200)
    for number in range(8):
        sim.submit(NewRequest(f"r{number}", [number] * 7, 40))
    gaps, _ = longest_gaps(sim)
    # 3 to 12 pages each: in the end one row a step
    assert max(gaps.values()) <= 8
    assert max(gaps.values()) > 2, "the budget was never short"


def test_turns_go_on_while_some_are_suspected() -> None:
    """A step of the suspects makes the others forget whose turn it is: the last of them stand
    still until nobody is suspected."""
    sim = simulation(cache_budget=12, num_blocks=200)
    for number in range(8):
        sim.submit(NewRequest(f"r{number}", [number] * 7, 40))
    suspect = sim.submit(NewRequest("suspect", [9] * 7, 60))
    assert suspect is not None
    sim.state.suspects.blame([(suspect, 50)])
    gaps, _ = longest_gaps(sim)
    assert max(gaps[f"r{number}", 0] for number in range(8)) <= 2 * 8


def test_a_prompt_takes_its_turn_beside_answers() -> None:
    """Answers that read the whole budget keep a prompt waiting until they have ended."""
    sim = simulation(cache_budget=10, num_blocks=200, max_batch_tokens=16)
    for number in range(3):
        sim.submit(NewRequest(f"r{number}", [number] * 9, 60))
    sim.submit(NewRequest("long", [9] * 24, 4))
    while "long" in sim.state.requests:
        assert sim.state.next_step_id < 60
        sim.turn()
    sim.run()


def test_the_more_urgent_do_not_wait_for_their_turn() -> None:
    """Under the priority policy urgent answers alternate with those that can wait."""
    sim = simulation(cache_budget=8, policy="priority")
    for number in range(4):
        sim.submit(NewRequest(f"r{number}", [number] * 7, 9, priority=number // 2))
    gaps, _ = longest_gaps(sim)
    assert [gaps[f"r{number}", 0] for number in (0, 1)] == [1, 1]
    assert max(gaps[f"r{number}", 0] for number in (2, 3)) > 1


def test_turns_change_no_token() -> None:
    """Taking turns loses a row's place, its memory or a token."""
    for seed in range(2):
        requests = random_requests(np.random.default_rng(seed), 40, prefixes=2, fork_share=0.2)
        setup = Setup(cache_budget=14, num_blocks=30, max_model_len=64, swap_chunks=10)
        assert run_workload(setup, requests, seed=seed, abort_share=0.2).tail_copies
