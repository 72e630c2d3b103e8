"""A step that fails costs the guilty request, and no other: the core with a shadow worker."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_svc.core.request import FinishReason, NewRequest, Request
from scheduler_svc.core.state import InFlight
from tests.support.expected_answers import expected
from tests.support.random_requests import random_requests
from tests.support.simulation import Setup, Simulation

Fails = Callable[[InFlight], bool]

TINY: dict[str, Any] = {
    "num_blocks": 24,
    "page_size": 4,
    "max_batch_tokens": 16,
    "max_requests": 8,
    "max_plans_in_flight": 2,
}
GEOMETRIES = {
    "full": Setup(**TINY),
    "one plan at a time": Setup(**{**TINY, "max_plans_in_flight": 1}),
    "hybrid": Setup(**TINY, groups=((0, 1), (7, 1))),
    "swap": Setup(**TINY, swap_chunks=30, overlaps_swap=True),
    "unshared": Setup(**TINY, allow_block_sharing=False),
    "static": Setup(**TINY, policy="static"),
    "priority": Setup(**TINY, policy="priority", swap_chunks=30),
    "prefill_first": Setup(**TINY, policy="prefill_first"),
}


class Trial:
    """A simulation whose worker fails where `fails` says so, and what that came to."""

    def __init__(self, setup: Setup, fails: Fails, tries_alone: int = 2) -> None:
        self.sim = Simulation(setup)
        self.fails = fails
        self.tries_alone = tries_alone
        self.guilty: list[str] = []
        self.num_failures = 0

    def turn(self) -> None:
        while self.sim.plan():
            pass
        if not self.sim.results:
            assert not self.sim.state.requests, "wedged"
            return
        step = self.sim.state.in_flight[0]
        if not self.fails(step):
            self.sim.absorb()
            return
        self.num_failures += 1
        computed = step.reaches()
        self.sim.fail_step()
        for request_id in self.sim.state.suspects.blame(computed, self.tries_alone):
            self.guilty.append(request_id)
            for request in list(self.sim.state.requests[request_id]):
                if request.finish_reason is None:
                    self.sim.state.finish(request, FinishReason.ABORT)

    def run(self, most_turns: int = 20_000) -> None:
        for _ in range(most_turns):
            if not self.sim.state.requests and not self.sim.results:
                break
            self.turn()
        assert not self.sim.state.requests, "nothing gets on"
        assert not self.sim.state.suspects.is_active, "suspicion outlives the suspects"
        self.sim.run()  # that nothing is left behind

    def assert_others_are_right(self, requests: list[NewRequest], guilty: set[str]) -> None:
        assert sorted(self.guilty) == sorted(guilty)
        windows = [window for window, _ in self.sim.setup.groups]
        for (request_id, index), tokens in expected(requests, 50, windows).items():
            if request_id not in guilty:
                assert self.sim.outcome.tokens[request_id, index] == tokens, request_id


def poison(guilty: set[str], shows: Callable[[Request, int], bool] = lambda *_: True) -> Fails:
    """Steps fail that compute one of these requests up to a place (tokens) where it shows."""
    return lambda step: any(
        request.request_id in guilty and shows(request, end) for request, end in step.reaches()
    )


PLACES = {
    "at once": lambda request, end: True,
    "inside the prompt": lambda request, end: end >= request.num_prompt_tokens // 2,
    "at the fifth token": lambda request, end: end >= request.num_prompt_tokens + 5,
    "when decoding alone": lambda request, end: (
        end > request.num_prompt_tokens + 2 and end == len(request.token_ids)
    ),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("setup", GEOMETRIES.values(), ids=GEOMETRIES)
def test_only_the_guilty_fail(setup: Setup, place: Callable[[Request, int], bool]) -> None:
    """A client's odd request takes its neighbours' answers with it, or is never found out."""
    forks = 0.0 if setup.policy == "static" else 0.3
    rng = np.random.default_rng(1)
    requests = random_requests(
        rng, 10, prompt=(4, 20), output=(9, 14), stop_share=0, fork_share=forks, priorities=3
    )
    guilty = {"r3", "r7", "r8"}
    trial = Trial(setup, poison(guilty, place))
    for new in requests:
        trial.sim.submit(new)
        if rng.random() < 0.5:  # others come while some are suspected
            trial.turn()
    trial.run()
    trial.assert_others_are_right(requests, guilty)


@pytest.mark.parametrize("num_guilty", [1, 2, 5])
def test_the_guilty_cost_a_logarithm_of_failed_steps(num_guilty: int) -> None:
    """Each failed step costs everybody their KV: trying one after the other is no way."""
    setup = Setup(num_blocks=400, max_requests=64, max_batch_tokens=512)
    requests = [NewRequest(f"r{i}", [i % 50, 2, 3], 20) for i in range(64)]
    guilty = {f"r{i}" for i in range(7, 7 + 9 * num_guilty, 9)}
    trial = Trial(setup, poison(guilty))
    for new in requests:
        trial.sim.submit(new)
    trial.run()
    trial.assert_others_are_right(requests, guilty)
    assert trial.num_failures <= 2 + num_guilty * (math.log2(64) + 1)


def test_a_passing_fault_fails_nobody() -> None:
    """Two unrelated faults in the life of a long answer end it, or one fault and its repetition
    some time later: the count must go down."""
    happened = {5, 6, 60, 61, 90, 115}

    def fails(step: InFlight) -> bool:
        if step.step_id in happened:
            happened.remove(step.step_id)
            return True
        return False

    requests = [NewRequest(f"r{i}", [i, 1], 100) for i in range(4)]
    trial = Trial(Setup(num_blocks=400), fails)
    for new in requests:
        trial.sim.submit(new)
    trial.run()
    assert not happened
    trial.assert_others_are_right(requests, set())


@pytest.mark.parametrize("tries_alone", [2, 3])
@pytest.mark.parametrize("setup", GEOMETRIES.values(), ids=GEOMETRIES)
def test_a_worker_that_fails_every_step(setup: Setup, tries_alone: int) -> None:
    """A broken device is tried for ever, or a request is restarted without end."""
    requests = [NewRequest(f"r{i}", [i, 2, 3], 10) for i in range(20)]
    times: dict[str, int] = {}

    def fails(step: InFlight) -> bool:
        for request_id in {request.request_id for request in step.requests}:
            times[request_id] = times.get(request_id, 0) + 1
        return True

    trial = Trial(setup, fails, tries_alone)
    for new in requests:
        trial.sim.submit(new)
    trial.run()
    assert sorted(trial.guilty) == sorted(new.request_id for new in requests)
    assert max(times.values()) <= 2 + math.log2(setup.max_requests) + tries_alone - 1


def test_failures_of_several_kinds_add_up() -> None:
    """A kind that proves little makes the next failure, of a kind that proves much, count alone: an
    innocent request fails. Or each kind is counted for itself, and a guilty one goes on long."""
    sim = Simulation(Setup(num_blocks=40, max_plans_in_flight=1))
    sim.submit(NewRequest("one", [1, 2, 3], 20))
    verdicts = []
    for tries_alone in (16, 16, 3, 2, 16, 16):
        sim.plan()
        computed = sim.state.in_flight[0].reaches()
        sim.fail_step()
        verdicts.append(sim.state.suspects.blame(computed, tries_alone))
    assert verdicts == [[], [], [], [], ["one"], ["one"]]  # 1/8 + 1/3 + 1/2 are not quite 1


def test_what_fails_only_together_ends_and_nobody_is_blamed() -> None:
    """A step too big for the device's memory: it is split again for every token, or blamed on
    whoever was in it."""
    requests = [NewRequest(f"r{i}", [i, 2, 3], 60) for i in range(8)]
    trial = Trial(Setup(num_blocks=400), lambda step: len(step.rows) > 5)
    for new in requests:
        trial.sim.submit(new)
    trial.run()
    trial.assert_others_are_right(requests, set())
    assert trial.num_failures < 60 / 2


def test_others_go_on_while_some_are_suspected() -> None:
    """A poison that takes long to show up again stops the service meanwhile; newcomers share its
    steps, and the blame."""
    setup = Setup(num_blocks=400, max_batch_tokens=16, max_requests=16)
    long = NewRequest("poison", list(range(40)) * 2, 20)
    trial = Trial(setup, poison({"poison"}, lambda request, end: end >= 81))
    trial.sim.submit(long)
    while not trial.num_failures:
        trial.turn()
    requests = [NewRequest(f"r{i}", [i, 2, 3], 3) for i in range(4)]
    for new in requests:
        trial.sim.submit(new)
    while trial.num_failures < 2:
        trial.turn()
    assert all((f"r{i}", 0) in trial.sim.outcome.reasons for i in range(4)), "they waited"
    assert trial.guilty == ["poison"]
    trial.run()
    trial.assert_others_are_right(requests, {"poison"})


def test_plans_are_the_same_again_under_suspicion() -> None:
    """A failure that cannot be replayed cannot be mended."""
    traces = []
    for _ in range(2):
        rng = np.random.default_rng(4)
        trial = Trial(GEOMETRIES["hybrid"], poison({"r2", "r7"}))
        trial.sim.keep_trace = True
        for new in random_requests(rng, 12, prompt=(2, 12), output=(2, 9), fork_share=0.3):
            trial.sim.submit(new)
            trial.turn()
        trial.run()
        traces.append((trial.sim.outcome.trace, trial.guilty))
    assert traces[0] == traces[1]
