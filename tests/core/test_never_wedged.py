"""Whatever was accepted ends: each case here once left a request waiting for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.request import NewRequest, Sampling
from tests.support.check import check
from tests.support.occupied import occupy
from tests.support.simulation import Setup, Simulation, verify
from tests.support.without_model import without_model

HYBRID = Setup(
    num_blocks=19,
    page_size=3,
    groups=((0, 1), (4, 1), (7, 1)),
    swap_chunks=40,
    max_model_len=37,
    max_requests=5,
    max_batch_tokens=21,
    safety_margin=0.0,
)
FOUND_BY_THE_MACHINE = replace(
    HYBRID, num_blocks=12, max_model_len=40, max_batch_tokens=12, safety_margin=0.15,
    allow_block_sharing=False, vocab_size=2,
)  # fmt: skip


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("overlaps_swap", [False, True], ids=["in_line", "overlapped"])
@pytest.mark.parametrize(
    ("setup", "prompt", "max_tokens"),
    [(HYBRID, 18, 12), (FOUND_BY_THE_MACHINE, 12, 2)],
    ids=["nearly_full", "found_by_the_machine"],
)
def test_a_sibling_offloaded_before_its_first_step_comes_back(
    setup: Setup, prompt: int, max_tokens: int, overlaps_swap: bool, depth: int
) -> None:
    """It keeps pages of its prompt that no window reads any more: more than the pool has."""
    setup = replace(setup, overlaps_swap=overlaps_swap, max_plans_in_flight=depth)
    new = NewRequest("r", [i % 2 for i in range(prompt)], max_tokens, Sampling(0.0), n=2)
    sim = Simulation(setup)
    sim.submit(new)
    outcome = sim.run()
    verify([new], outcome, setup)
    assert outcome.counters.offloads + outcome.counters.soft_resets


def test_what_is_forked_or_offloaded_holds_only_what_its_windows_read() -> None:
    """It takes memory, and room in the swap pool, for what nobody reads again."""
    sim = Simulation(replace(HYBRID, num_blocks=40))
    sim.submit(NewRequest("r", list(range(18)), 12, Sampling(0.0), n=2))
    assert sim.plan()  # the whole prompt; its result is not back
    parent, sibling = sim.state.rows.running.values()
    tables = sim.state.memory.tables
    # the next query, at position 18, reads 18 or 3 or 6 tokens before it
    read = [6, 1, 2]
    assert [len(tables.of(group, parent.row)) for group in range(3)] == [6, 6, 6]
    assert [len(tables.of(group, sibling.row)) for group in range(3)] == read
    for request in (parent, sibling):
        sim.state.preempt([request])
        assert request.swapped is not None
        assert [len(blocks) for blocks in request.swapped.blocks] == read
    check(sim.state)
    sim.run()


def scatter(sim: Simulation, tokens: list[int]) -> None:
    """Leaves the content of the tokens' pages cached, each in a chunk of its own."""
    request = sim.submit(NewRequest("first", tokens, 1))
    assert request is not None
    sim.run()
    names = list(request.names)
    sim.scheduler.flush_cache()
    tables = []
    device = sim.state.memory.device
    for group, allocator in enumerate(device.allocators):
        needed = names[allocator.first_page(len(tokens)) :]
        size = allocator.blocks_per_chunk
        blocks = occupy(device, len(needed) * size, group)
        for name, block in zip(needed, blocks[::size].tolist(), strict=True):
            allocator.publish(block, name)
        tables.append(blocks)
    device.give_tables(tables)
    assert device.is_free
    assert len(device.chunks.cached) == sum(len(a.block_of) for a in device.allocators)


def test_a_hit_that_lies_scattered_over_the_whole_pool_is_left() -> None:
    """What it shares would hold all chunks, and leave none for the group that needs one more."""
    sim = Simulation(Setup(num_blocks=8, groups=((0, 1), (25, 4)), max_requests=2))
    tokens = list(range(16))
    scatter(sim, tokens)
    sim.submit(NewRequest("second", [*tokens, 30, 31], 2))
    sim.run()
    assert sim.outcome.cached_tokens["second", 0] == 0


@pytest.mark.parametrize("swap_chunks", [0, 20])
def test_the_last_one_comes_back_with_its_blocks_side_by_side(swap_chunks: int) -> None:
    """What it found lies scattered, so that its groups block each other; preempted, it finds the
    same blocks again, for ever."""
    sim = Simulation(
        Setup(num_blocks=9, groups=((0, 1), (25, 4)), max_requests=2, swap_chunks=swap_chunks)
    )
    tokens = list(range(16))
    scatter(sim, tokens)
    sim.worker.step = without_model  # type: ignore[method-assign]
    sim.submit(NewRequest("second", [*tokens, 30, 31], 6))
    for _ in range(40):
        sim.turn()
    assert sim.outcome.cached_tokens["second", 0] == 16
    assert sim.state.counters.soft_resets + sim.state.counters.offloads == 1
    assert not sim.state.requests
