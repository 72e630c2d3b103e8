"""A state machine over the pool and its allocators: whatever is done, no block is lost."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scheduler_svc.core.admission import why_never_fits
from scheduler_svc.core.check import check
from scheduler_svc.core.commit import commit
from scheduler_svc.core.batch import Admission, Decision
from scheduler_svc.core.limits import FULL_ATTENTION, Geometry, GroupGeometry, Limits
from scheduler_svc.core.request import FinishReason, NewRequest, Request
from scheduler_svc.core.room import Room
from scheduler_svc.core.state import State


class AllocatorMachine(RuleBasedStateMachine):
    """Requests are admitted, grow, are reset and end, in any order that the API allows.

    Steps are committed by hand and never in flight, so that only memory is at stake.
    """

    @initialize(
        num_chunks=st.integers(1, 12),
        blocks_per_chunk=st.integers(1, 4),
        page_size=st.integers(1, 5),
        num_groups=st.integers(1, 2),
    )
    def start(
        self, num_chunks: int, blocks_per_chunk: int, page_size: int, num_groups: int
    ) -> None:
        groups = tuple(
            GroupGeometry(FULL_ATTENTION, 1, blocks_per_chunk + group)
            for group in range(num_groups)
        )
        geometry = Geometry(page_size, num_chunks + 2, 64, groups, max_model_len=64)
        self.state = State(Limits(64, 6), geometry)
        self.count = 0

    @rule(tokens=st.integers(1, 20))
    def admit(self, tokens: int) -> None:
        self.count += 1
        request = NewRequest(f"r{self.count}", list(range(tokens)), 8)
        if why_never_fits(self.state.geometry, tokens, 8) is None:
            self.state.submit(request)

    @rule(data=st.data())
    def schedule(self, data: st.DataObject) -> None:
        """Computes some tokens of a waiting or a running request, if they fit."""
        live = list(self.state.requests.values())
        if not live:
            return
        request = data.draw(st.sampled_from(live))
        is_new = request.row < 0
        if is_new and self.state.rows.num_free == 0:
            return
        row = self.state.rows.next_free(1)[0] if is_new else request.row
        computed = 0 if is_new else int(self.state.rows.computed[row])
        left = len(request.token_ids) - computed
        if left == 0:
            return
        count = data.draw(st.integers(1, left))
        needs = []
        for group, allocator in enumerate(self.state.allocators):
            wanted = int(allocator.blocks_for(np.array([computed + count], np.int32))[0])
            needs.append(wanted - (0 if is_new else int(self.state.rows.table_len[group, row])))
        before = self._free()
        if not Room(self.state).fits(needs):
            assert self._free() == before, "a refusal changed something"
            return
        room = Room(self.state)
        room.take(needs)
        step = commit(
            self.state,
            Decision(
                (),
                (request,) if is_new else (),
                np.array([row], np.int32),
                np.array([count], np.int32),
                np.array(needs, np.int32)[:, None],
            ),
        )
        assert step is not None
        assert room.free_share() == Room(self.state).free_share(), "planned and taken differ"
        self._forget(step.requests[0])

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        running = list(self.state.rows.running.values())
        if running:
            victim = data.draw(st.sampled_from(running))
            room = Room(self.state)
            room.give_row(victim.row)
            self.state.soft_reset(victim)
            assert room.free_share() == Room(self.state).free_share(), "gain was miscounted"

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        live = list(self.state.requests.values())
        if live:
            self.state.finish(data.draw(st.sampled_from(live)), FinishReason.ABORT)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "state"):
            check(self.state)

    def teardown(self) -> None:
        if hasattr(self, "state"):
            for request in list(self.state.requests.values()):
                self.state.finish(request, FinishReason.ABORT)
            check(self.state)
            assert self.state.pool.num_free == self.state.pool.num_usable

    def _forget(self, request: Request) -> None:
        """Takes the step back out of flight, as if nothing had been sampled."""
        self.state.in_flight.clear()
        self.state.rows.num_in_flight[request.row] = 0
        self.state.rows.outstanding[request.row] = 0
        self.state.rows.is_decoding[request.row] = False

    def _free(self) -> tuple[int, list[int]]:
        return self.state.pool.num_free, [a.num_free for a in self.state.allocators]


AllocatorMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None
)
TestAllocatorMachine = AllocatorMachine.TestCase
