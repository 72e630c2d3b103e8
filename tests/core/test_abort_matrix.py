"""An abort in every state: it ends at once, frees everything, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_svc.core.request import FinishReason, NewRequest, Request, RequestState
from tests.support.check import check
from tests.support.expected_answers import expected
from tests.support.occupied import occupy
from tests.support.simulation import Setup, Simulation

VICTIM, SURVIVOR = "victim", "survivor"


def victim_of(sim: Simulation) -> Request:
    return sim.state.requests[VICTIM][0]


def pending(sim: Simulation) -> None:
    pass


def prefilling_mid_chunk(sim: Simulation) -> None:
    sim.turn()
    assert victim_of(sim).state is RequestState.PREFILLING


def decoding(sim: Simulation) -> None:
    while victim_of(sim).num_output_tokens < 2:
        sim.turn()


def in_flight(sim: Simulation) -> None:
    decoding(sim)
    if not sim.results:
        assert sim.plan()
    assert sim.state.rows.num_in_flight[victim_of(sim).row] == 1


def two_in_flight(sim: Simulation) -> None:
    decoding(sim)
    while sim.plan():
        pass
    assert sim.state.rows.num_in_flight[victim_of(sim).row] == 2


def reset(sim: Simulation) -> None:
    """Preempts the victim while the swap pool has no room for it."""
    swap = sim.state.memory.swap
    others = occupy(swap, swap.counts.free_chunks)
    sim.state.preempt([victim_of(sim)])
    swap.give(0, others)
    assert victim_of(sim).swapped is None


def soft_reset(sim: Simulation) -> None:
    decoding(sim)
    while sim.results:
        sim.absorb()
    reset(sim)


def offloaded(sim: Simulation) -> None:
    decoding(sim)
    while sim.results:
        sim.absorb()
    sim.state.preempt([victim_of(sim)])
    assert sim.state.memory.swap.chunks.num_free < sim.setup.swap_chunks


def offloaded_in_flight(sim: Simulation) -> None:
    decoding(sim)
    while sim.plan():
        pass
    sim.state.preempt([victim_of(sim)])


def soft_reset_in_flight(sim: Simulation) -> None:
    decoding(sim)
    while sim.plan():
        pass
    reset(sim)


STATES = [
    pending,
    prefilling_mid_chunk,
    decoding,
    in_flight,
    two_in_flight,
    soft_reset,
    soft_reset_in_flight,
    offloaded,
    offloaded_in_flight,
]


@pytest.mark.parametrize("reach", STATES, ids=lambda reach: reach.__name__)
@pytest.mark.parametrize("depth", [1, 2])
def test_abort(reach: Callable[[Simulation], None], depth: int) -> None:
    """An abort leaks blocks or rows, frees them under a running step, or ends twice."""
    if reach is two_in_flight and depth == 1:
        pytest.skip("needs two plans in flight")
    sim = Simulation(Setup(max_batch_tokens=8, max_plans_in_flight=depth, swap_chunks=20))
    requests = [NewRequest(VICTIM, list(range(20)), 20), NewRequest(SURVIVOR, [7, 8, 9], 20)]
    for new in requests:
        sim.submit(new)
    reach(sim)
    victim = victim_of(sim)
    held = set(sim.state.memory.tables.of(0, victim.row).tolist()) if victim.row >= 0 else set()
    was_in_flight = any(victim in step.requests for step in sim.state.in_flight)

    sim.abort(VICTIM)
    check(sim.state)
    assert victim.state is RequestState.FINISHED
    assert victim.finish_reason is FinishReason.ABORT
    assert VICTIM not in sim.state.requests
    chunks = sim.state.memory.device.chunks
    freed = held <= {*chunks.clean, *chunks.cached}
    was_preempted = reach in (soft_reset_in_flight, offloaded_in_flight)
    assert freed == (not was_in_flight or was_preempted), "too early, or too late"
    before = list(sim.outcome.tokens[VICTIM, 0])

    sim.abort(VICTIM)  # twice, and unknown: nothing happens
    sim.abort("nobody")
    for _ in range(depth):
        sim.turn()
        check(sim.state)
    assert victim.row < 0, f"its row is not free {depth} results after the abort"
    outcome = sim.run()
    assert outcome.tokens[VICTIM, 0] == before, "tokens after the end"
    assert outcome.tokens[SURVIVOR, 0] == (expected(requests, sim.setup.vocab_size)[SURVIVOR, 0])


def test_abort_of_a_finished_request_is_ignored() -> None:
    """A client that closes right after its answer must not disturb anything."""
    sim = Simulation(Setup())
    sim.submit(NewRequest(VICTIM, [1], 1))
    sim.turn()
    assert sim.outcome.reasons == {(VICTIM, 0): FinishReason.LENGTH}
    sim.abort(VICTIM)
    sim.run()


def test_finishing_twice_is_a_broken_invariant() -> None:
    """Two ends of one request would reach the client."""
    sim = Simulation(Setup())
    request = sim.submit(NewRequest(VICTIM, [1], 1))
    assert request is not None
    sim.abort(VICTIM)
    with pytest.raises(AssertionError, match="victim ended already"):
        sim.state.finish(request, FinishReason.ABORT)


@pytest.mark.parametrize("turns", range(6))
def test_an_abort_takes_all_siblings(turns: int) -> None:
    """Siblings that were not forked off yet, or were, stay behind with rows and blocks."""
    sim = Simulation(Setup(max_batch_tokens=8, max_plans_in_flight=2))
    sim.submit(NewRequest(VICTIM, list(range(20)), 20, n=3))
    sim.submit(NewRequest(SURVIVOR, [7, 8, 9], 20))
    for _ in range(turns):
        sim.turn()
    sim.abort(VICTIM)
    check(sim.state)
    assert VICTIM not in sim.state.requests
    for _ in range(2):
        sim.turn()
    assert all(r.request_id != VICTIM for r in sim.state.rows.running.values())
    assert len(sim.run().reasons) == 4
