"""State machines over the paged memory: whatever is done, no block is lost and no token wrong.

`AllocatorMachine` has the pool and its allocators alone; `MemoryMachine` the whole core with a
shadow worker, where any request may be aborted, reset, offloaded or flushed at any moment.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_svc.core.decide import decide
from scheduler_svc.core.room import Room

from protos.plan import Int32
from scheduler_svc.core.check import check
from scheduler_svc.core.memory.allocators import FullAttentionAllocator
from scheduler_svc.core.memory.cache_pool import CachePool
from scheduler_svc.core.request import NO_ROW, NewRequest, Request, RequestState, Sampling
from scheduler_svc.core.step.shortage import by_kind
from tests.support.fresh_seeds import SECONDS
from tests.support.simulation import Setup, Simulation, verify


class AllocatorMachine(RuleBasedStateMachine):
    """Two groups share a pool; tables take, share and give blocks, some of them named."""

    @initialize(chunks=st.integers(1, 8), sizes=st.tuples(st.integers(1, 4), st.integers(1, 3)))
    def start(self, chunks: int, sizes: tuple[int, int]) -> None:
        self.pool = CachePool(chunks + 2)
        self.allocators = [FullAttentionAllocator(self.pool, 4, size) for size in sizes]
        self.tables: list[tuple[int, Int32]] = []  # (group, blocks)
        self.contents: dict[tuple[int, int], bytes] = {}
        self.count = 0

    @rule(group=st.integers(0, 1), count=st.integers(1, 6))
    def take(self, group: int, count: int) -> None:
        allocator = self.allocators[group]
        needs = [count, 0] if group == 0 else [0, count]
        room = Room(self.allocators)
        if not room.fits(needs):
            return  # asking has taken nothing: the invariant sees to that
        room.take(needs)
        blocks = allocator.take(count)
        assert len(set(blocks.tolist())) == count
        assert not {(group, b) for b in blocks.tolist()} & self.owned(), "taken twice"
        for block in blocks.tolist():
            assert block not in allocator.name_of, "a new owner finds old content under a name"
            self.contents.pop((group, block), None)
        self.tables.append((group, blocks))
        assert room.free_share() == Room(self.allocators).free_share(), "planned and taken differ"

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        group, blocks = data.draw(st.sampled_from(self.tables))
        block = int(data.draw(st.sampled_from(blocks.tolist())))
        self.count += 1
        content = b"%d" % self.count
        self.allocators[group].publish(block, content)
        self.contents.setdefault((group, block), content)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        group, blocks = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        room = Room(self.allocators)
        room.give(group, blocks)
        self.allocators[group].give(blocks)
        assert room.free_share() == Room(self.allocators).free_share(), "gain was miscounted"

    @precondition(lambda self: any(a.block_of for a in self.allocators))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """A hit, on an owned block or a free one that still has its content."""
        named = [(g, b) for g, a in enumerate(self.allocators) for b in a.block_of.values()]
        group, block = data.draw(st.sampled_from(sorted(named)))
        assert self.allocators[group].name_of[block] == self.contents[group, block]
        blocks = np.array([block], np.int32)
        room = Room(self.allocators)
        assert room.share(group, blocks), "a named block is always there to be shared"
        self.allocators[group].share(blocks)
        self.tables.append((group, blocks))
        assert room.free_share() == Room(self.allocators).free_share()

    @rule()
    def flush(self) -> None:
        for allocator in self.allocators:
            allocator.flush()
        self.pool.flush()
        self.contents.clear()
        assert not any(a.name_of for a in self.allocators)

    @invariant()
    def every_chunk_is_somewhere(self) -> None:
        if not hasattr(self, "pool"):
            return
        chunks = [*self.pool.clean, *self.pool.cached]
        for group, allocator in enumerate(self.allocators):
            chunks += allocator.held_chunks()
            owned = [b for g, blocks in self.tables if g == group for b in blocks.tolist()]
            counts = np.bincount(owned, minlength=len(allocator.owners))
            assert (counts == allocator.owners).all()
            size = allocator.blocks_per_chunk
            assert allocator.num_free + len(set(owned)) == len(allocator.held_chunks()) * size
        assert sorted(chunks) == list(range(2, self.pool.num_chunks))

    def owned(self) -> set[tuple[int, int]]:
        return {(group, block) for group, blocks in self.tables for block in blocks.tolist()}

    def teardown(self) -> None:
        for group, blocks in getattr(self, "tables", []):
            self.allocators[group].give(blocks)
        if hasattr(self, "pool"):
            assert self.pool.num_free == self.pool.num_usable


GROUPS = [((0, 1),), ((0, 3),), ((5, 1),), ((0, 2), (5, 3)), ((0, 1), (4, 1), (7, 1))]


class MemoryMachine(RuleBasedStateMachine):
    """The whole core on a vocabulary of two tokens, so that prefixes collide all the time."""

    @initialize(
        chunks=st.integers(12, 30),
        page_size=st.integers(2, 5),
        groups=st.sampled_from(GROUPS),
        swap_chunks=st.sampled_from([0, 5, 40]),
        depth=st.integers(1, 2),
        policy=st.sampled_from(["fifo", "prefill_first", "priority"]),
        is_sharing=st.booleans(),
        overlaps_swap=st.booleans(),
    )
    def start(
        self,
        chunks: int,
        page_size: int,
        groups: tuple[tuple[int, int], ...],
        swap_chunks: int,
        depth: int,
        policy: str,
        is_sharing: bool,
        overlaps_swap: bool,
    ) -> None:
        self.sim = Simulation(
            Setup(
                num_blocks=chunks,
                page_size=page_size,
                groups=groups,
                swap_chunks=swap_chunks,
                max_plans_in_flight=depth,
                policy=policy,
                allow_block_sharing=is_sharing,
                overlaps_swap=overlaps_swap,
                max_batch_tokens=12,
                max_requests=5,
                max_model_len=40,
                vocab_size=2,
            )
        )
        self.requests: list[NewRequest] = []

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        max_tokens=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        priority=st.integers(0, 2),
        seed=st.integers(0, 9),
        salt=st.sampled_from(["", "", "x"]),
    )
    def submit(
        self, prompt: list[int], max_tokens: int, n: int, priority: int, seed: int, salt: str
    ) -> None:
        new = NewRequest(
            f"r{len(self.requests)}",
            prompt,
            max_tokens,
            Sampling(1.0, seed=seed),
            priority,
            salt,
            n,
        )
        self.requests.append(new)
        self.sim.submit(new)

    @rule()
    def plan(self) -> None:
        first, second = decide(self.sim.state), decide(self.sim.state)
        assert first.rows.tolist() == second.rows.tolist(), "deciding changed something"
        assert first.new_blocks.tolist() == second.new_blocks.tolist()
        self.sim.plan()

    @precondition(lambda self: self.sim.results)
    @rule()
    def absorb(self) -> None:
        self.sim.absorb()

    @rule(times=st.integers(1, 6))
    def turn(self, times: int) -> None:
        for _ in range(times):
            self.sim.turn()

    @precondition(lambda self: self.sim.state.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.sim.abort(data.draw(st.sampled_from(sorted(self.sim.state.requests))))

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Anybody, for no reason, by swapping if there is room."""
        request = data.draw(st.sampled_from(self.running()))
        soft_resets, offloads = by_kind(self.sim.state, [request])
        for victim in soft_resets:
            self.sim.state.soft_reset(victim)
        for victim in offloads:
            self.sim.state.offload(victim)

    @rule()
    def flush(self) -> None:
        self.sim.state.flush_cache()

    def running(self) -> list[Request]:
        state = self.sim.state
        return [
            r
            for row, r in state.rows.running.items()
            if r.state is not RequestState.FINISHED
            and not state.rows.awaits_fork[row]
            and r.row != NO_ROW
        ]

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "sim"):
            check(self.sim.state)

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            verify(self.requests, self.sim.run(), self.sim.setup)


AllocatorMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
TestAllocatorMachine = AllocatorMachine.TestCase
MemoryMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestMemoryMachine = MemoryMachine.TestCase


class MemoryMachineAnew(MemoryMachine):
    """The same, never twice alike."""


MemoryMachineAnew.TestCase.settings = settings(
    settings.get_profile("explore"),
    max_examples=max(20, round(3 * SECONDS)),
    stateful_step_count=60,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
@pytest.mark.timeout(3000)
class TestMemoryMachineAnew(MemoryMachineAnew.TestCase):  # type: ignore[misc]
    """New seeds in every run: what it finds belongs into test_never_wedged.py or its like."""
