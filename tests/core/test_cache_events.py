"""What the prefix cache reports is what it holds."""

from __future__ import annotations

import random

import pytest

from scheduler_svc.core.memory.block_names import Name
from scheduler_svc.core.memory.cache_events import Cleared, RemovedBlock, StoredBlock
from scheduler_svc.core.request import NewRequest
from tests.support.simulation import Setup, Simulation

PAGE_SIZE = 4


class Listener:
    """Follows the events, as a gateway does."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.blocks: dict[Name, StoredBlock] = {}
        self.num_removed = 0
        self.events = sim.state.listen_to_cache()

    def follow(self) -> None:
        for event in self.events.take():
            match event:
                case StoredBlock():
                    assert event.name not in self.blocks
                    self.blocks[event.name] = event
                case RemovedBlock():
                    del self.blocks[event.name]
                    self.num_removed += 1
                case Cleared():
                    self.blocks.clear()
        allocator = next(a for a in self.sim.state.memory.groups if not a.sliding_window)
        assert self.blocks.keys() == allocator.block_of.keys()


@pytest.mark.parametrize("groups", [((0, 1),), ((0, 1), (6, 1))], ids=["full", "hybrid"])
def test_events_follow_the_cache_in_a_tiny_pool(groups: tuple[tuple[int, int], ...]) -> None:
    """A block that is gone and still routed to, or one that is never heard of: after every step of
    a run that reuses blocks, preempts, and is flushed in between."""
    sim = Simulation(
        Setup(
            groups=groups,
            num_blocks=24,
            page_size=PAGE_SIZE,
            max_batch_tokens=16,
            max_requests=6,
            max_model_len=40,
            vocab_size=100,
        )
    )
    listener = Listener(sim)
    draw = random.Random(1)
    for number in range(40):
        prefix = [draw.randrange(3)] * draw.choice([4, 8, 12])
        sim.submit(NewRequest(f"r{number}", [*prefix, 50 + number % 7], draw.randrange(1, 9)))
    turns = 0
    while sim.state.requests:
        sim.turn()
        listener.follow()
        turns += 1
        if turns == 20:
            sim.state.memory.flush()
            listener.follow()
            assert listener.blocks == {}
    assert listener.num_removed > 0


def test_a_block_brings_its_tokens_and_its_parent() -> None:
    """Whoever routes by prefixes must be able to follow them from the start."""
    sim = Simulation(
        Setup(
            num_blocks=50,
            page_size=PAGE_SIZE,
            max_batch_tokens=16,
            max_requests=4,
            max_model_len=40,
            vocab_size=100,
        )
    )
    listener = Listener(sim)
    prompt = list(range(1, 13))
    sim.submit(NewRequest("a", prompt, 1))
    sim.run()
    listener.follow()
    first, second, third = listener.blocks.values()
    assert [*first.token_ids, *second.token_ids, *third.token_ids] == prompt
    assert (first.parent, second.parent, third.parent) == (None, first.name, second.name)


def test_nothing_is_recorded_while_nobody_listens() -> None:
    """Serving without a gateway must not pay for one."""
    sim = Simulation(Setup(num_blocks=50, max_batch_tokens=16, max_requests=4, vocab_size=100))
    sim.submit(NewRequest("a", list(range(1, 33)), 1))
    sim.run()
    assert sim.state.cache_events is None
    assert all(allocator.events is None for allocator in sim.state.memory.groups)
