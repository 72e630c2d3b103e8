"""Nobody is kept out for ever: each case here once was."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.request import NewRequest
from tests.support.simulation import Setup, Simulation


def turns_until_end(sim: Simulation, request_id: str, newcomer: NewRequest, most: int) -> int:
    """Turns that a request takes while newcomers never cease to arrive."""
    for turn in range(most):
        if request_id not in sim.state.requests:
            return turn
        while len(sim.state.pending) < 3:
            name = f"n{sim.state.next_ticket}"
            tokens = [2, 3, 4, 5 + sim.state.next_ticket % 40]
            sim.submit(NewRequest(name, tokens, newcomer.max_tokens, priority=newcomer.priority))
        sim.turn()
    raise AssertionError(f"{request_id} has not ended after {most} turns")


def test_a_long_prompt_ends_though_newcomers_fit_the_cache_budget_better() -> None:
    """A chunked prefill waits while small newcomers are let past it."""
    sim = Simulation(Setup(num_blocks=200, max_requests=4, max_batch_tokens=16, cache_budget=20))
    sim.submit(NewRequest("first", [9, 9], 30))
    sim.turn()  # somebody decodes already, so the old one never is the first of an empty batch
    sim.submit(NewRequest("old", [1] * 100, 5))
    assert turns_until_end(sim, "old", NewRequest("", [], 8), 400) < 200


def test_who_has_aged_to_the_front_is_not_preempted_by_the_next_newcomer() -> None:
    """Under the priority policy, admitted by age and thrown out by priority, again and again."""
    sim = Simulation(Setup(num_blocks=400, max_requests=4, max_batch_tokens=16, policy="priority"))
    sim.submit(NewRequest("old", [1] * 60, 20, priority=1))
    old = sim.state.requests["old"][0]
    turns_until_end(sim, "old", NewRequest("", [], 8), 4000)
    assert old.num_preemptions < 10


def test_a_static_batch_of_a_sliding_model_is_refused_by_what_it_reserves() -> None:
    """A request is accepted by its window and can never be admitted by its pages."""
    sim = Simulation(Setup(num_blocks=8, groups=((9, 1),), policy="static"))
    assert sim.submit(NewRequest("too long", [1] * 4, 60)) is None
    assert sim.submit(NewRequest("fits", [1] * 4, 28)) is not None
    sim.run()


def test_what_follows_a_step_that_was_not_finite_is_not_shared() -> None:
    """With two plans in flight, the second one publishes what the first one spoiled."""
    sim = Simulation(Setup(max_plans_in_flight=2, max_batch_tokens=16))
    sim.submit(NewRequest("a", list(range(20)), 8))
    assert sim.plan()
    assert sim.plan()
    spoiled = sim.results[0]
    sim.results[0] = type(spoiled)(
        **{name: getattr(spoiled, name) for name in spoiled.__slots__}
        | {"is_finite": np.zeros(1, np.int32)}
    )
    sim.absorb()
    sim.absorb()
    assert not sim.state.memory.groups[0].block_of


def test_a_static_batch_finds_room_in_its_block_tables() -> None:
    """Block tables as wide as a sliding window needs, for what reserves all its pages."""
    sim = Simulation(
        Setup(num_blocks=7, page_size=3, groups=((0, 1), (7, 3)), max_model_len=20, policy="static")
    )
    sim.submit(NewRequest("r", list(range(10)), 5))
    sim.run()
    assert len(sim.outcome.tokens["r", 0]) == 5
