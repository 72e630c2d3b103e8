"""The priority policy: who goes for a more urgent request, and that nobody goes for nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.request import NewRequest
from tests.support.random_requests import random_requests
from tests.support.simulation import Setup, Simulation, run_workload

SETUP = Setup(
    num_blocks=100, max_batch_tokens=512, max_requests=16, max_model_len=512, policy="priority",
    safety_margin=0.2, allow_block_sharing=False,
)  # fmt: skip


def running(pages: dict[str, int], **changes: object) -> Simulation:
    """Requests of priority 1 that decode, each in the middle of a page, with so many pages."""
    sim = Simulation(replace(SETUP, **changes))  # type: ignore[arg-type]
    margin = sim.state.limits
    object.__setattr__(sim.state, "limits", replace(margin, safety_margin=0.0))
    for name, count in pages.items():
        sim.submit(NewRequest(name, [7] * (4 * count - 3), 100, priority=1))
    while sim.state.pending or not sim.state.rows.is_decoding[sim.state.rows.in_use()].all():
        sim.turn()
    object.__setattr__(sim.state, "limits", margin)
    return sim


@pytest.mark.parametrize("share", [81, 84, 87])
def test_an_urgent_request_that_fits_joins_below_the_margin(share: int) -> None:
    """It waits until those that are less urgent have ended, though there is room for it."""
    sim = running({"a": 20, "b": 20, "c": 20, "d": share - 60})
    sim.submit(NewRequest("urgent", [1] * 25, 4, priority=0))
    step = sim.peek()
    assert step.soft_resets == []
    assert step.admitted == ["urgent"]


def test_one_that_is_not_more_urgent_heeds_the_margin() -> None:
    """The margin is gone for everybody."""
    sim = running({"a": 20, "b": 20, "c": 20, "d": 25})
    sim.submit(NewRequest("equal", [1] * 25, 4, priority=1))
    assert sim.peek().admitted == []


@pytest.mark.parametrize(
    ("pages", "prompt", "victims"),
    [
        ({"a": 25, "b": 25, "c": 25, "d": 25}, 50, ["d", "c"]),
        ({"a": 25, "b": 25, "c": 25, "d": 25}, 26, ["d", "c"]),
        ({"a": 25, "b": 25, "c": 25, "d": 25}, 25, ["d"]),
        ({"a": 10, "b": 60, "c": 10, "d": 20}, 50, ["b"]),  # one large one, not three small ones
        ({"a": 40, "b": 30, "c": 20, "d": 10}, 45, ["a", "d"]),  # and then the newest that does
        ({"a": 25, "b": 25, "c": 25, "d": 20}, 5, []),
        ({"a": 25, "b": 25, "c": 25, "d": 25}, 99, ["d", "c", "b", "a"]),
    ],
)
@pytest.mark.parametrize("swap_chunks", [0, 200])
def test_the_fewest_go_that_make_room(
    pages: dict[str, int], prompt: int, victims: list[str], swap_chunks: int
) -> None:
    """One goes, use falls under some threshold, and the urgent one waits all the same; or more go
    than must."""
    sim = running(pages, swap_chunks=swap_chunks)
    sim.submit(NewRequest("urgent", [1] * (4 * prompt), 1, priority=0))
    step = sim.peek()
    assert sorted(step.soft_resets + step.offloads) == sorted(victims)
    assert step.admitted == ["urgent"]
    sim.run()


def test_nobody_goes_when_all_of_them_would_not_do() -> None:
    """KV is thrown away, and the urgent request waits for more urgent ones all the same."""
    sim = running({"a": 20, "b": 20})
    sim.submit(NewRequest("equal", [1] * 160, 9, priority=0))
    sim.turn()
    sim.submit(NewRequest("urgent", [1] * (4 * 61), 4, priority=0))
    step = sim.peek()
    assert step.soft_resets == step.admitted == []


def test_rows_are_made_free_as_well() -> None:
    """Every row is taken by something less urgent, and blocks there are enough."""
    sim = running(dict.fromkeys("abcd", 5), max_requests=4)
    sim.submit(NewRequest("urgent", [1] * 20, 4, priority=0, n=2))
    step = sim.peek()
    assert sorted(step.soft_resets) == ["c", "d"]
    assert step.admitted == ["urgent"]
    sim.run()


def test_a_long_urgent_prompt_goes_on_below_the_margin() -> None:
    """Its first chunk is computed; then those that decode below the margin keep it waiting."""
    sim = running({"a": 18, "b": 18, "c": 18, "d": 18}, max_batch_tokens=20)
    sim.submit(NewRequest("urgent", [1] * 76, 4, priority=0))
    urgent = sim.state.requests["urgent"][0]
    for _ in range(8):
        sim.turn()
    assert urgent.num_output_tokens
    sim.run()


def test_an_urgent_request_goes_before_a_less_urgent_prompt() -> None:
    """A long prompt that is less urgent takes all tokens of every step, and the blocks that were
    made free."""
    sim = Simulation(replace(SETUP, max_batch_tokens=16))
    sim.submit(NewRequest("long", [7] * 300, 4, priority=1))
    sim.turn()
    sim.submit(NewRequest("urgent", [1] * 25, 4, priority=0))
    urgent = sim.state.requests["urgent"][0]
    for _ in range(3):
        sim.turn()
    assert urgent.num_output_tokens
    sim.run()


def test_who_was_overtaken_comes_back_in_the_old_order() -> None:
    """The last victim is the first to come back."""
    sim = running({"a": 25, "b": 25, "c": 25, "d": 25})
    sim.submit(NewRequest("later", [1] * 4, 1, priority=1))
    sim.submit(NewRequest("urgent", [1] * 300, 1, priority=0))
    sim.turn()
    assert [r.request_id for r in sim.state.pending.in_order()] == ["b", "c", "d", "later"]
    sim.run()


@pytest.mark.parametrize("seed", range(4))
def test_with_any_priorities_everybody_ends_and_nobody_is_tossed_about(seed: int) -> None:
    """Two requests preempt each other, over and over."""
    setup = replace(
        SETUP, num_blocks=30, max_model_len=64, max_batch_tokens=32,
        max_plans_in_flight=1 + seed // 2,
        swap_chunks=[0, 0, 60, 10][seed], overlaps_swap=seed == 3,
        groups=((0, 1),) if seed % 2 == 0 else ((0, 1), (9, 2)),
    )  # fmt: skip
    requests = random_requests(
        np.random.default_rng(seed), 60, prompt=(4, 40), output=(1, 24), priorities=4,
        fork_share=0.1,
    )  # fmt: skip
    outcome = run_workload(setup, requests, seed=seed, arrivals_per_turn=0.5)
    preemptions = outcome.counters.soft_resets + outcome.counters.offloads
    assert 10 < preemptions < 4 * len(requests)


def test_nobody_joins_only_to_be_swapped_out_at_once() -> None:
    """A prompt that uses up the margin beside more urgent answers is computed, and thrown away in
    the next step, over and over."""
    sim = running({"a": 40, "b": 35})
    sim.submit(NewRequest("large", [1] * 72, 4, priority=2))
    assert sim.peek().admitted == []
    sim.submit(NewRequest("small", [1] * 40, 4, priority=1))
    assert sim.peek().admitted == ["small"]
    sim.run()
