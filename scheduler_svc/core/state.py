"""Every fact about every live request, and the few operations that move one between states.

    submit ─▶ PENDING ──assign──▶ PREFILLING ──first token──▶ DECODING ──▶ FINISHED
                 ▲                     │                          │
                 └──────soft_reset─────┴──────────────────────────┘

A finished request that plans in flight still name keeps its row and blocks until the last of
them has returned: `release` gives them back, once, and is the only place that does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protos.plan import Int32
from scheduler_svc.core.allocators import FullAttentionAllocator
from scheduler_svc.core.cache_pool import CachePool
from scheduler_svc.core.limits import NO_MEMORY, Geometry, Limits
from scheduler_svc.core.pending import PendingQueue
from scheduler_svc.core.request import (
    NO_ROW,
    FinishReason,
    NewRequest,
    Request,
    RequestState,
)
from scheduler_svc.core.rows import Rows


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A plan without a result: what was sent, for results carry no request ids."""

    step_id: int
    rows: Int32  # [R]
    num_new_tokens: Int32  # [R]
    generation: Int32  # [R] of the rows when planned
    sampled: npt.NDArray[np.intp]  # [S] indices into rows: those that sample
    admitted: Int32  # [I] rows with a new tenant
    requests: list[Request]  # [R]


class State:
    """The scheduler's state; decide reads it, commit, absorb and the methods here change it."""

    def __init__(self, limits: Limits, geometry: Geometry = NO_MEMORY) -> None:
        self.limits = limits
        self.requests: dict[str, Request] = {}  # every live request, in order of arrival
        self.pending = PendingQueue()
        self.next_ticket = 0
        self.next_step_id = 0
        self.num_soft_resets = 0
        self.in_flight: deque[InFlight] = deque()
        self._set_memory(geometry)

    def _set_memory(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.pool = CachePool(geometry.num_chunks)
        self.allocators = [
            FullAttentionAllocator(self.pool, geometry.page_size, group.blocks_per_chunk)
            for group in geometry.groups
        ]
        longest = min(geometry.max_model_len, geometry.pool_tokens)
        self.rows = Rows(
            self.limits.max_requests_per_batch,
            len(geometry.groups),
            -(-longest // geometry.page_size),
        )

    def submit(self, new: NewRequest) -> Request:
        """Accepts a request; the caller has checked that it can ever fit (admission.py)."""
        assert new.request_id not in self.requests, f"{new.request_id} is live already"
        request = Request(
            request_id=new.request_id,
            ticket=self.next_ticket,
            token_ids=list(new.prompt_token_ids),
            num_prompt_tokens=len(new.prompt_token_ids),
            max_total_tokens=len(new.prompt_token_ids) + new.max_tokens,
            sampling=new.sampling,
            priority=new.priority,
            cache_salt=new.cache_salt,
        )
        self.next_ticket += 1
        self.requests[request.request_id] = request
        self.pending.add(request)
        return request

    def finish(
        self, request: Request, reason: FinishReason, stop_token_id: int | None = None
    ) -> None:
        """Ends a live request, in whatever state it is."""
        assert request.state is not RequestState.FINISHED, f"{request.request_id} ended already"
        if request.row == NO_ROW:
            self.pending.remove(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.stop_token_id = stop_token_id
        del self.requests[request.request_id]
        if request.row == NO_ROW:
            return
        self.rows.is_finished[request.row] = True
        if self.rows.num_in_flight[request.row] == 0:
            self.release(request)

    def release(self, request: Request) -> None:
        """Gives back the blocks and the row of a request."""
        row = request.row
        for group, allocator in enumerate(self.allocators):
            # the last block first: what comes first in the table is taken again last
            allocator.give(self.rows.blocks_of(group, row)[::-1])
            self.rows.table_len[group, row] = 0
        self.rows.vacate(request)

    def soft_reset(self, request: Request) -> None:
        """Takes everything from a running request but its tokens; it waits in its old place.

        Blocks and row are free at once, also while a plan in flight names them: the worker works
        through plans in order, so whoever gets them next writes after that plan has read.
        """
        self.release(request)
        request.state = RequestState.PENDING
        request.num_preemptions += 1
        self.num_soft_resets += 1
        self.pending.add(request)

    def lose_worker(self, geometry: Geometry = NO_MEMORY) -> None:
        """All KV is gone: every running request is soft-reset, plans in flight are forgotten.

        `geometry` is the memory of the worker that comes next. Requests keep every token that
        has come back; what was sampled but never returned is sampled again, to the same end.
        """
        self.in_flight.clear()
        self.next_step_id = 0  # each session counts its steps from 0
        self.rows.num_in_flight[:] = 0
        for request in list(self.rows.running.values()):
            if request.state is RequestState.FINISHED:
                self.release(request)
            else:
                self.soft_reset(request)
        for request in self.requests.values():
            request.num_in_flight = 0
        self._set_memory(geometry)
