"""Answers that go on: what was delivered before counts as output."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.request import FinishReason, NewRequest, RequestState, Sampling
from scheduler_svc.core.scheduler import Scheduler
from tests.support.check import check
from tests.support.expected_answers import expected
from tests.support.simulation import Setup, Simulation

PROMPT = [1, 2, 3, 4, 5, 6, 7]
NEW = NewRequest("a", PROMPT, 20, Sampling(temperature=1.0, seed=7))


def answer(new: NewRequest) -> list[int]:
    sim = Simulation(Setup())
    sim.submit(new)
    return sim.run().tokens["a", new.index]


@pytest.mark.parametrize("known", [1, 4, 9, 19])
def test_it_goes_on_with_the_same_tokens(known: int) -> None:
    """Positions, random numbers or the limit count from the end of what was delivered."""
    whole = answer(NEW)
    assert len(whole) == 20
    assert answer(replace(NEW, output_token_ids=whole[:known])) == whole


def test_the_index_is_that_of_the_sibling_that_was_lost() -> None:
    """A resumed second sibling goes on with the first one's random numbers."""
    third = expected([replace(NEW, n=3)], Setup().vocab_size)["a", 2]
    assert third != answer(NEW)
    assert answer(replace(NEW, index=2, output_token_ids=third[:5])) == third
    sim = Simulation(Setup())
    sim.submit(replace(NEW, n=2, index=1))
    assert sim.run().tokens["a", 2] == third


def test_all_of_it_is_found_in_the_prefix_cache() -> None:
    """What was generated is computed again although its blocks are there; or more tokens of the
    prompt are said to be cached than it has."""
    sim = Simulation(Setup())
    sim.submit(NEW)
    whole = sim.run().tokens["a", 0]
    sim.submit(replace(NEW, request_id="b", output_token_ids=whole[:14]))
    assert sim.plan()
    assert sim.state.in_flight[-1].num_new_tokens.tolist() == [1]
    assert sim.run().cached_tokens["b", 0] == len(PROMPT)


@pytest.mark.parametrize(
    ("output", "reason", "stop"), [([8, 9], "stop", 9), ([8, 8, 8], "length", None)]
)
def test_an_answer_that_was_complete_ends_at_once(
    output: list[int], reason: str, stop: int | None
) -> None:
    """It waits for a step that has nothing to compute, or gets one token too many."""
    setup = Setup()
    scheduler = Scheduler(setup.limits(), setup.geometry())
    new = NewRequest(
        "a", PROMPT, 3, Sampling(stop_token_ids=frozenset({9})), output_token_ids=output
    )
    (request,) = scheduler.submit(new)
    assert request.state is RequestState.FINISHED
    assert request.finish_reason is FinishReason(reason)
    assert request.stop_token_id == stop
    assert scheduler.plan() is None
    assert not scheduler.state.requests
    check(scheduler.state)


def test_a_stop_token_inside_the_prompt_ends_nothing() -> None:
    """The prompt's last token is taken for an output token."""
    stops = Sampling(stop_token_ids=frozenset({7}))
    setup = Setup()
    scheduler = Scheduler(setup.limits(), setup.geometry())
    (request,) = scheduler.submit(NewRequest("a", PROMPT, 3, stops))
    assert request.state is RequestState.PENDING
