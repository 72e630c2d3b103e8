"""What commit makes of a decision, where that is more than doing as it says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scheduler_svc.core.commit import commit
from scheduler_svc.core.decide import decide

from scheduler_svc.core.check import check
from scheduler_svc.core.request import NewRequest, Request, Sampling
from tests.support.simulation import Setup, Simulation, verify


def test_a_tail_whose_sharers_have_left_is_not_copied() -> None:
    """Who shares a last page may be preempted after the copy was decided. The copy then takes a
    block for nothing, and the decision counted on that one for somebody else."""
    sim = Simulation(Setup(num_blocks=20))
    new = NewRequest("a", [1, 2, 3, 4, 5], 8, Sampling(1.0), n=2)
    sim.submit(new)
    sim.turn()
    first, second = sim.state.rows.running.values()
    decision = decide(sim.state)
    assert decision.tail_copies.tolist() == [[1, 0]]
    allocator = sim.state.allocators[0]
    others = allocator.take(sim.state.pool.num_free)  # not one block is left
    only_first = replace(
        decision,
        soft_resets=(second,),
        rows=decision.rows[:1],
        num_new_tokens=decision.num_new_tokens[:1],
        new_blocks=decision.new_blocks[:, :1],
        tail_copies=decision.tail_copies[:, :1],
    )
    step = commit(sim.state, only_first)
    assert step is not None
    assert step.requests == [first]
    assert step.transfers.copy == []
    allocator.give(others)
    check(sim.state)


PAIR = [NewRequest("a", [1, 2, 3, 4, 5], 12), NewRequest("b", [5, 4, 3, 2, 1], 12)]


def overlapping(**fields: int) -> tuple[Simulation, Request]:
    """Two requests run, and the worker copies beside the forward; the younger one of them."""
    sim = Simulation(Setup(num_blocks=20, swap_chunks=20, overlaps_swap=True, **fields))
    for new in PAIR:
        sim.submit(new)
    sim.turn()
    return sim, sim.state.requests["b"][0]


@pytest.mark.parametrize("depth", [1, 2])
def test_offloaded_blocks_wait_for_the_plans_result(depth: int) -> None:
    """What is still being copied is given to somebody else, or never comes back."""
    sim, younger = overlapping(max_plans_in_flight=depth)
    free = sim.state.pool.num_free
    sim.state.offload(younger)
    assert (younger.row, sim.state.pool.num_free) == (-1, free)
    check(sim.state)
    sim.state.pending.remove(younger)  # so that it does not come back at once
    assert sim.plan()  # carries the copies
    assert sim.state.pool.num_free == free
    while sim.results:
        assert sim.state.pool.num_free == free
        sim.absorb()
    assert sim.state.pool.num_free == free + 2
    sim.state.wait(younger)
    verify(PAIR, sim.run(), sim.setup)


def test_copies_that_no_plan_carries_are_recalled() -> None:
    """Blocks wait for the result of a plan that is never made: nothing gets on any more."""
    sim, younger = overlapping()
    older = sim.state.requests["a"][0]
    for request in (older, younger):
        sim.state.offload(request)
    sim.abort("a")
    check(sim.state)
    assert younger.swapped is not None
    sim.state.pending.remove(younger)
    assert commit(sim.state, decide(sim.state)) is None
    assert younger.swapped is None
    assert sim.state.pool.num_free == sim.state.pool.num_usable
    assert sim.state.swap_pool.num_free == sim.state.swap_pool.num_usable
    assert (sim.state.counters.offloads, sim.state.counters.soft_resets) == (1, 1)


def test_a_lost_worker_ends_the_quarantine() -> None:
    """Blocks of a worker that has died are waited for."""
    sim, younger = overlapping(max_plans_in_flight=2)
    sim.state.offload(younger)
    sim.plan()
    sim.lose_worker()
    check(sim.state)
    assert sim.state.pool.num_free == sim.state.pool.num_usable
    assert np.count_nonzero(sim.state.allocators[0].owners) == 0
    verify(PAIR, sim.run(), sim.setup)
