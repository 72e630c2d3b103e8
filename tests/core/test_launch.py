"""How a step is completed, where that is more than drawing what was taken for it."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.core.request import NewRequest, Request, Sampling
from scheduler_svc.core.step.batch import Batch
from scheduler_svc.core.step.launch import launch
from tests.support.check import check
from tests.support.occupied import occupy
from tests.support.simulation import Setup, Simulation, verify


def test_a_tail_whose_sharers_have_left_is_not_copied() -> None:
    """Who shares a last page may be preempted after a copy of it was planned. The copy then takes
    a block for nothing, and the step counted on that one for somebody else."""
    sim = Simulation(Setup(num_blocks=20))
    new = NewRequest("a", [1, 2, 3, 4, 5], 8, Sampling(1.0), n=2)
    sim.submit(new)
    sim.turn()
    first, second = sim.state.rows.running.values()
    device = sim.state.memory.device
    batch = Batch(sim.state)
    batch.add_row(first.row, 1)
    assert [part.tail_copies.tolist() for part in batch.parts] == [[[True]]]
    others = occupy(device, device.counts.free_chunks)
    assert not device.take([1])  # not one block is left
    batch.preempt([second])
    somebody_else = occupy(device, 1)
    step = launch(batch)
    assert step is not None
    assert step.requests == [first]
    assert step.transfers.copy == []
    assert device.chunks.num_free == 0
    device.give(0, others)
    device.give(0, somebody_else)
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
    free = sim.state.memory.device.chunks.num_free
    sim.state.preempt([younger])
    assert (younger.row, sim.state.memory.device.chunks.num_free) == (-1, free)
    check(sim.state)
    sim.state.pending.remove(younger)  # so that it does not come back at once
    assert sim.plan()  # carries the copies
    assert sim.state.memory.device.chunks.num_free == free
    while sim.results:
        assert sim.state.memory.device.chunks.num_free == free
        sim.absorb()
    assert sim.state.memory.device.chunks.num_free == free + 2
    sim.state.pending.add(younger, younger.ticket)
    verify(PAIR, sim.run(), sim.setup)


def test_copies_that_no_plan_carries_are_recalled() -> None:
    """Blocks wait for the result of a plan that is never made: nothing gets on any more."""
    sim, younger = overlapping()
    older = sim.state.requests["a"][0]
    sim.state.preempt([older, younger])
    sim.abort("a")
    check(sim.state)
    assert younger.swapped is not None
    sim.state.pending.remove(younger)
    assert sim.scheduler.plan() is None
    assert younger.swapped is None
    assert sim.state.memory.device.chunks.num_free == sim.state.memory.device.chunks.num_usable
    assert sim.state.memory.swap.chunks.num_free == sim.state.memory.swap.chunks.num_usable
    assert (sim.state.counters.offloads, sim.state.counters.soft_resets) == (1, 1)


def test_a_lost_worker_ends_the_quarantine() -> None:
    """Blocks of a worker that has died are waited for."""
    sim, younger = overlapping(max_plans_in_flight=2)
    sim.state.preempt([younger])
    sim.plan()
    sim.lose_worker()
    check(sim.state)
    assert sim.state.memory.device.chunks.num_free == sim.state.memory.device.chunks.num_usable
    assert np.count_nonzero(sim.state.memory.groups[0].owners) == 0
    verify(PAIR, sim.run(), sim.setup)
