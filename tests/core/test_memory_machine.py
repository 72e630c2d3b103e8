"""State machines over the paged memory: whatever is done, no block is lost and no token wrong.

`BlockPoolMachine` has the pool, its allocators and their counts alone; `MemoryMachine` the whole
core with a shadow worker, where any request may be aborted, preempted or flushed at any moment.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protos.plan import Int32, encode_plan
from scheduler_svc.core.limits import FULL_ATTENTION, Geometry, GroupGeometry
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.counts import Counts
from scheduler_svc.core.request import NO_ROW, NewRequest, Request, RequestState, Sampling
from tests.support.check import check
from tests.support.fresh_seeds import SECONDS
from tests.support.simulation import Setup, Simulation, verify


class BlockPoolMachine(RuleBasedStateMachine):
    """Two groups share a pool; blocks are taken at once and drawn later, as a step does it; tables
    share and give them, some of them named. The counts are compared with a plain recount of
    which blocks are owned."""

    @initialize(chunks=st.integers(1, 8), sizes=st.tuples(st.integers(1, 4), st.integers(1, 3)))
    def start(self, chunks: int, sizes: tuple[int, int]) -> None:
        self.sizes = sizes
        groups = tuple(GroupGeometry(FULL_ATTENTION, 1, size) for size in sizes)
        geometry = Geometry(4, chunks + 2, 64, groups, max_model_len=64)
        self.pool = BlockPool(geometry, chunks + 2, reserved=2)
        self.tables: list[tuple[int, Int32]] = []  # (group, blocks)
        self.contents: dict[tuple[int, int], bytes] = {}
        self.undrawn = [0, 0]  # blocks of each group that are counted as taken
        self.has_given = False  # since the first of them was taken
        self.count = 0

    @rule(
        needs=st.one_of(
            st.tuples(st.integers(0, 6), st.just(0)),
            st.tuples(st.just(0), st.integers(0, 6)),
            st.tuples(st.integers(0, 3), st.integers(0, 3)),
        ),
        shares=st.integers(0, 3),
        data=st.data(),
    )
    def take(self, needs: tuple[int, int], shares: int, data: st.DataObject) -> None:
        """All or nothing; hits are on owned blocks or on free ones that still have their content.
        They are shared before anything is given back in the same step, if at all."""
        shared: list[Int32] = []
        named = sorted((g, b) for g, a in enumerate(self.pool.allocators) for b in a.name_of)
        if shares and named and not self.has_given:
            hits = data.draw(st.lists(st.sampled_from(named), max_size=shares, unique=True))
            shared = [np.array([b for g, b in hits if g == group], np.int32) for group in (0, 1)]
            for group, block in hits:
                allocator = self.pool.allocators[group]
                assert allocator.name_of[block] == self.contents[group, block]
        before, fits = counted(self.pool.counts), self._fits(needs, shared)
        is_taken = self.pool.take(needs, shared)
        if self.has_given:  # then the counts know less of the chunks: see the invariant
            assert fits or not is_taken
        else:
            assert is_taken == fits
        if not any(needs) and not any(self.undrawn):
            assert is_taken, "a named block is always there to be shared"
        if not is_taken:
            assert counted(self.pool.counts) == before, "a refusal took something"
            return
        self.undrawn = [old + new for old, new in zip(self.undrawn, needs, strict=True)]
        self.tables += [(g, blocks) for g, blocks in enumerate(shared) if len(blocks)]

    @precondition(lambda self: any(self.undrawn))
    @rule(spares=st.booleans(), order=st.permutations([0, 1]))
    def draw(self, spares: bool, order: list[int]) -> None:
        """`spares`: clean chunks may be used up before cached content is."""
        counts, pool = self.pool.counts, self.pool
        if spares:
            pool.begin_drawing(self.undrawn)
        for group in order:
            count, self.undrawn[group] = self.undrawn[group], 0
            if not count:
                continue
            blocks = pool.draw(group, count)
            assert len(set(blocks.tolist())) == count
            assert not {(group, b) for b in blocks.tolist()} & self.owned(), "drawn twice"
            for block in blocks.tolist():
                name_of = pool.allocators[group].name_of
                assert block not in name_of, "a new owner finds old content under a name"
                self.contents.pop((group, block), None)
            self.tables.append((group, blocks))
        if not (spares or self.has_given):
            assert counted(counts) == self._recounted(), "taken and drawn differ"
        before = counts.free_share()
        pool.end_drawing()
        assert counts.free_share() == pytest.approx(before), "taken and drawn differ"
        self.has_given = False

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        group, blocks = data.draw(st.sampled_from(self.tables))
        block = int(data.draw(st.sampled_from(blocks.tolist())))
        self.count += 1
        content = b"%d" % self.count
        self.pool.allocators[group].publish(block, content)
        self.contents.setdefault((group, block), content)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        group, blocks = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        now = counted(self.pool.counts)
        later = self.pool.counts.copy()
        later.give(group, blocks)
        assert counted(self.pool.counts) == now, "what-if changed something"
        self.pool.give(group, blocks)
        assert counted(self.pool.counts) == counted(later), "gain was miscounted"
        self.has_given = any(self.undrawn)

    @rule()
    def flush(self) -> None:
        for allocator in self.pool.allocators:
            allocator.flush()
        self.pool.chunks.flush()
        self.contents.clear()
        assert not any(a.name_of for a in self.pool.allocators)

    @invariant()
    def every_chunk_is_somewhere(self) -> None:
        if not hasattr(self, "pool"):
            return
        chunks = [*self.pool.chunks.clean, *self.pool.chunks.cached]
        owned = self.owned()
        for group, allocator in enumerate(self.pool.allocators):
            chunks += allocator.held_chunks()
            named = [b for g, blocks in self.tables if g == group for b in blocks.tolist()]
            counts = np.bincount(named, minlength=len(allocator.owners))
            assert (counts == allocator.owners).all()
            size = allocator.blocks_per_chunk
            num_owned = sum(g == group for g, _ in owned)
            assert allocator.num_free + num_owned == len(allocator.held_chunks()) * size
            assert allocator.held_chunks() == sorted({b // size for g, b in owned if g == group})
        assert sorted(chunks) == list(range(2, self.pool.chunks.num_chunks))

    @invariant()
    def the_counts_say_what_is_free(self) -> None:
        """All of it; while some is still to be drawn, they may take a chunk as used that is going
        to be spared, for what was given meanwhile. They never promise more."""
        if not hasattr(self, "pool"):
            return
        counts, (free_chunks, free_blocks) = self.pool.counts, self._recounted()
        if not self.has_given:
            assert counted(counts) == (free_chunks, free_blocks)
            return
        in_chunks = sum(free / size for free, size in zip(free_blocks, self.sizes, strict=True))
        share = (free_chunks + in_chunks) / counts.num_usable
        assert counts.free_share() == pytest.approx(share)
        assert counts.shortfall([0, 0]) >= -free_chunks

    def owned(self) -> set[tuple[int, int]]:
        return {(group, block) for group, blocks in self.tables for block in blocks.tolist()}

    def _recounted(self, shared: Sequence[Int32] = ()) -> tuple[int, list[int]]:
        """Free chunks, and free blocks [G] of chunks in use, from the tables alone, once these
        blocks are shared and what was taken is drawn."""
        owned = self.owned()
        owned |= {(group, block) for group, table in enumerate(shared) for block in table.tolist()}
        free_chunks, free_blocks = self.pool.chunks.num_usable, []
        for group, size in enumerate(self.sizes):
            blocks = [b for g, b in owned if g == group]
            held = len({b // size for b in blocks})
            missing = self.undrawn[group] - (held * size - len(blocks))
            held += max(0, -(-missing // size))
            free_chunks -= held
            free_blocks.append(held * size - len(blocks) - self.undrawn[group])
        return free_chunks, free_blocks

    def _fits(self, needs: Sequence[int], shared: Sequence[Int32]) -> bool:
        """Whether that many blocks are there beside the shared ones. A free block that what is
        undrawn was to get is not there to be shared: it is not known which one it gets."""
        free_chunks, free_blocks = self._recounted()
        owned = self.owned()
        for group, table in enumerate(shared):
            size = self.sizes[group]
            revived = [block for block in table.tolist() if (group, block) not in owned]
            held = {block // size for block in revived}
            held -= {block // size for g, block in owned if g == group}
            free_chunks -= len(held)
            free_blocks[group] += len(held) * size - len(revived)
        if free_chunks < 0 or min(free_blocks) < 0:
            return False
        for need, free, size in zip(needs, free_blocks, self.sizes, strict=True):
            free_chunks -= max(0, -(-(need - free) // size))
        return free_chunks >= 0

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        if any(self.undrawn):
            self.draw(spares=True, order=[0, 1])
        for group, blocks in self.tables:
            self.pool.give(group, blocks)
        assert self.pool.is_free
        assert counted(self.pool.counts) == (self.pool.chunks.num_usable, [0, 0])


def counted(counts: Counts) -> tuple[int, list[int]]:
    return counts.free_chunks, list(counts.free_blocks)


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
            ),
            keep_trace=True,
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
        """The same state gives the same plan, byte by byte; a copy shares nothing with it."""
        before = pickle.dumps(self.sim.state)
        plans = [self.sim.peek().plan for _ in range(2)]
        assert pickle.dumps(self.sim.state) == before, "a copy changed the original"
        encoded = [encode_plan(plan) for plan in plans if plan is not None]
        assert len(encoded) == 2 * self.sim.plan(), "one of them planned nothing"
        if encoded:
            counts, buffer = encoded[0]
            assert encoded[1] == encoded[0]
            trace = np.array(counts, np.int32).tobytes() + buffer
            assert trace == self.sim.outcome.trace[-1], "the copies planned another step"

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
        self.sim.state.preempt([request])

    @rule()
    def flush(self) -> None:
        self.sim.scheduler.flush_cache()

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


BlockPoolMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
TestBlockPoolMachine = BlockPoolMachine.TestCase
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
