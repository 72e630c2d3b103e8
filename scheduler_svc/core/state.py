"""Every fact about every live request, and the few operations that move one between states.

    submit ─▶ PENDING ──assign──▶ PREFILLING ──last chunk planned──▶ DECODING ──▶ FINISHED
                 ▲                     │                                 │
                 └─soft_reset, offload─┴─────────────────────────────────┘

A finished request that plans in flight still name keeps its row and blocks until the last of
them has returned: `release` gives them back, once, and is the only place that does.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from protos.plan import Int32
from scheduler_svc.core.allocators import FullAttentionAllocator, SlidingAttentionAllocator
from scheduler_svc.core.cache_pool import CachePool
from scheduler_svc.core.limits import NO_MEMORY, Geometry, Limits
from scheduler_svc.core.pending import PendingQueue
from scheduler_svc.core.policies import FIFO, Policy
from scheduler_svc.core.prefix_cache import PrefixCache
from scheduler_svc.core.request import (
    NO_ROW,
    FinishReason,
    NewRequest,
    Request,
    RequestState,
    Swapped,
)
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.step_time import StepCost, aim_of
from scheduler_svc.core.suspects import Suspects


@dataclass(slots=True)
class Transfers:
    """What the next plan moves before its forward: (group, from, to) triples."""

    swap_out: list[tuple[int, int, int]] = field(default_factory=list)  # block → swap block
    swap_in: list[tuple[int, int, int]] = field(default_factory=list)  # swap block → block
    copy: list[tuple[int, int, int]] = field(default_factory=list)  # block → block
    # blocks [G] that the worker may read for swap_out until the plan's result is back
    quarantined: list[tuple[Request, list[Int32]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A plan without a result: what was sent, for results carry no request ids.

    It names the rows that it computes, and behind them the siblings that it forks off.
    """

    step_id: int
    rows: Int32  # [R] computed
    num_new_tokens: Int32  # [R]
    ends: Int32  # [R] tokens of each row after the step
    named: Int32  # [R + forks] rows
    generation: Int32  # [R + forks] of the rows when planned
    requests: list[Request]  # [R + forks]
    sampled: npt.NDArray[np.intp]  # [S] index into rows: whose last token's logits are sampled
    sampled_for: npt.NDArray[np.intp]  # [S] index into named: who gets the token
    new_tenants: Int32  # [I] rows
    transfers: Transfers
    freed_swap: list[tuple[int, Int32]]  # (group, swap blocks), free once the plan has returned

    def reaches(self) -> list[tuple[Request, int]]:
        """Whom the step computes or forks off, and the end of that, in tokens of the request."""
        forks = self.requests[len(self.rows) :]
        ends = self.ends.tolist() + [sibling.num_prompt_tokens for sibling in forks]
        return list(zip(self.requests, ends, strict=True))


@dataclass(slots=True)
class Counters:
    """What has happened since the start, for the operator."""

    soft_resets: int = 0
    offloads: int = 0
    restores: int = 0


class State:
    """The scheduler's state; decide reads it, commit, absorb and the methods here change it."""

    def __init__(
        self, limits: Limits, geometry: Geometry = NO_MEMORY, policy: Policy = FIFO
    ) -> None:
        self.limits = limits
        self.policy = policy
        # request_id → the request and its siblings, as far as they live; in order of arrival
        self.requests: dict[str, list[Request]] = {}
        self.num_live = 0  # of them, siblings counted each
        self.pending = PendingQueue()
        self.suspects = Suspects()
        self.counters = Counters()
        self.next_ticket = 0
        self.next_step_id = 0
        self.in_flight: deque[InFlight] = deque()
        self.transfers = Transfers()  # for the next plan
        # ran, and found no place in the last plan's cache budget; whoever waits longest first
        self.left_out: tuple[Request, ...] = ()
        self.step_cost = StepCost(aim_of(limits.target_step_ms, geometry.device), geometry.device)
        self._set_memory(geometry)

    @property
    def plans_allowed(self) -> int:
        """How many plans may be without a result."""
        return 1 if self.suspects.is_active else self.limits.max_plans_in_flight

    def _set_memory(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.pool = CachePool(geometry.num_chunks)
        self.swap_pool = CachePool(geometry.num_swap_chunks, reserved=0)
        self.allocators: list[FullAttentionAllocator] = []
        self.swap_allocators: list[FullAttentionAllocator] = []
        for group in geometry.groups:
            shape = (geometry.page_size, group.blocks_per_chunk)
            self.allocators.append(
                SlidingAttentionAllocator(self.pool, *shape, group.sliding_window)
                if group.sliding_window
                else FullAttentionAllocator(self.pool, *shape)
            )
            self.swap_allocators.append(FullAttentionAllocator(self.swap_pool, *shape))
        self.prefix_cache = PrefixCache(self.allocators, geometry.page_size)
        # what is known of the same device holds on
        if geometry.groups and geometry.device != self.step_cost.device:
            aim = aim_of(self.limits.target_step_ms, geometry.device)
            self.step_cost = StepCost(aim, geometry.device)
        longest = geometry.pool_tokens(self.policy.holds_finished)
        self.rows = Rows(
            self.limits.max_requests_per_batch,
            len(geometry.groups),
            -(-longest // geometry.page_size),
        )

    def submit(self, new: NewRequest) -> list[Request]:
        """Accepts a request and its siblings; the caller has checked that it can ever fit."""
        assert new.request_id not in self.requests, f"{new.request_id} is live already"
        first = Request(
            request_id=new.request_id,
            ticket=self.next_ticket,
            token_ids=list(new.prompt_token_ids),
            num_prompt_tokens=len(new.prompt_token_ids),
            max_total_tokens=len(new.prompt_token_ids) + new.max_tokens,
            sampling=new.sampling,
            priority=new.priority,
            cache_salt=new.cache_salt,
            prompt=np.array(new.prompt_token_ids, np.int32),
        )
        if self.limits.allow_block_sharing and self.allocators:
            self.prefix_cache.name_prompt(first)
        first.siblings = [
            replace(
                first,
                index=index,
                ticket=first.ticket + index,
                token_ids=list(first.token_ids),
                siblings=[],
                names=list(first.names),
            )
            for index in range(1, new.n)
        ]
        self.next_ticket += new.n
        self.num_live += new.n
        self.requests[new.request_id] = [first, *first.siblings]
        self.wait(first)
        return [first, *first.siblings]

    def wait(self, request: Request) -> None:
        """Puts a request into the queue, in the place that the policy gives it."""
        self.pending.add(request, self.policy.urgency(request))

    def num_queued(self) -> int:
        """Waiting requests that no row is free for."""
        free = self.rows.num_free
        num_running = len(self.rows.running) - int(self.rows.is_finished[self.rows.order()].sum())
        if self.num_live - num_running <= free:
            return 0
        num_queued = len(self.pending)
        for request in self.pending.in_order():
            free -= 1 + len(request.siblings)
            if free < 0:
                break
            num_queued -= 1
        return num_queued

    def live(self) -> Iterator[Request]:
        """Every live request and sibling, in order of arrival."""
        return itertools.chain.from_iterable(self.requests.values())

    def finish(
        self, request: Request, reason: FinishReason, stop_token_id: int | None = None
    ) -> None:
        """Ends a live request, in whatever state it is; siblings not forked off end with it."""
        assert request.state is not RequestState.FINISHED, f"{request.name} ended already"
        if request in self.pending:
            self.pending.remove(request)
        self.drop_swapped(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.stop_token_id = stop_token_id
        family = self.requests[request.request_id]
        family.remove(request)
        self.num_live -= 1
        if not family:
            del self.requests[request.request_id]
        self.suspects.ended(request, is_last=not family)
        siblings, request.siblings = request.siblings, []
        for sibling in siblings:
            self.finish(sibling, reason)
        if request.row == NO_ROW:
            return
        self.rows.finish(request.row)
        if self.policy.holds_finished:
            self.release_ended_batch()
        elif self.rows.num_in_flight[request.row] == 0:
            self.release(request)

    def release_ended_batch(self) -> None:
        """Gives back a static batch, once all of it has ended and no plan names it."""
        if self.rows.is_finished[self.rows.order()].all() and not self.in_flight:
            for request in list(self.rows.running.values()):
                self.release(request)

    def release(self, request: Request) -> None:
        """Gives back the blocks and the row of a request."""
        self.prefix_cache.break_promises(request)
        self.give_back(self._take_tables(request.row))
        self.rows.vacate(request)
        for sibling in request.siblings:
            if sibling.row != NO_ROW:
                self.rows.vacate(sibling)
                sibling.state = RequestState.PENDING

    def _take_tables(self, row: int) -> list[Int32]:
        """The row's block tables [G], which are empty after that."""
        return [self.rows.take_blocks(group, row) for group in range(len(self.allocators))]

    def window(self, row: int) -> list[Int32]:
        """The row's blocks [G] that later queries read: not those only plans in flight need."""
        kept = []
        for group, allocator in enumerate(self.allocators):
            first = max(
                int(self.rows.table_first[group, row]),
                allocator.first_page(int(self.rows.computed[row])),
            )
            kept.append(self.rows.table[group, row, first : self.rows.table_len[group, row]])
        return kept

    def leave_behind(self, group: int, row: int, first: int) -> None:
        """Gives back the row's pages before `first`, which no later query reads."""
        begin = int(self.rows.table_first[group, row])
        self.allocators[group].give(self.rows.table[group, row, begin:first][::-1])
        self.rows.table_first[group, row] = first

    def give_back(self, tables: list[Int32]) -> None:
        """Takes one owner from every block of these tables [G]."""
        for allocator, blocks in zip(self.allocators, tables, strict=True):
            # the last block first: what comes first in a table is reclaimed last
            allocator.give(blocks[::-1])

    def soft_reset(self, request: Request) -> None:
        """Takes everything from a running request but its tokens; it waits in its old place.

        Blocks and row are free at once, also while a plan in flight names them: the worker works
        through plans in order, so whoever gets them next writes after that plan has read.
        """
        self._requeue(request)
        request.num_preemptions += 1
        self.counters.soft_resets += 1

    def _requeue(self, request: Request) -> None:
        """Takes rows and blocks from a running request, which waits in its old place."""
        self.release(request)
        request.state = RequestState.PENDING
        self.wait(request)

    def offload(self, request: Request) -> None:
        """Moves a running request's KV to the swap pool, with the next plan; it waits for space.

        The caller has seen that the swap pool has room. What a plan in flight computes for it
        counts: the copy is made after that plan. Where the worker copies beside the forward, the
        blocks stay owned until the plan's result is back: who gets them writes in that plan.

        Only what later queries read is kept, so that an empty pool always holds what is restored.
        """
        row = request.row
        first_pages, swap_tables = [], []
        for group, (allocator, kept) in enumerate(
            zip(self.swap_allocators, self.window(row), strict=True)
        ):
            self.leave_behind(group, row, int(self.rows.table_len[group, row]) - len(kept))
            blocks = self.rows.blocks_of(group, row)
            swap_blocks = allocator.take(len(blocks))
            pairs = zip(blocks.tolist(), swap_blocks.tolist(), strict=True)
            self.transfers.swap_out += [(group, block, swap) for block, swap in pairs]
            first_pages.append(int(self.rows.table_first[group, row]))
            swap_tables.append(swap_blocks)
        request.swapped = Swapped(
            int(self.rows.computed[row]), tuple(first_pages), tuple(swap_tables)
        )
        if self.geometry.overlaps_swap:
            self.transfers.quarantined.append((request, self._take_tables(row)))
        self._requeue(request)
        request.num_preemptions += 1
        self.counters.offloads += 1

    def recall_offloads(self) -> None:
        """No plan will carry the copies that wait for one: what is quarantined for them is free
        at once, and who was to be offloaded is computed again, as after a soft reset."""
        for request, _ in list(self.transfers.quarantined):
            assert request.swapped is not None, f"{request.name} has no KV to lose"
            self.drop_swapped(request)
            self.counters.offloads -= 1
            self.counters.soft_resets += 1

    def drop_swapped(self, request: Request) -> None:
        """Gives an offloaded request's swap blocks back, if it is offloaded; while plans are in
        flight, with the newest one's result."""
        if request.swapped is None:
            return
        freed = list(enumerate(request.swapped.blocks))
        request.swapped = None
        # copies that no plan has carried yet are not made any more
        places = {(group, block) for group, blocks in freed for block in blocks.tolist()}
        self.transfers.swap_out = [
            triple for triple in self.transfers.swap_out if (triple[0], triple[2]) not in places
        ]
        waiting, self.transfers.quarantined = self.transfers.quarantined, []
        for holder, tables in waiting:
            if holder is request:
                self.give_back(tables)
            else:
                self.transfers.quarantined.append((holder, tables))
        if self.in_flight:
            self.in_flight[-1].freed_swap.extend(freed)
        else:
            self.free_swap(freed)

    def free_swap(self, freed: list[tuple[int, Int32]]) -> None:
        for group, blocks in freed:
            self.swap_allocators[group].give(blocks)

    def flush_cache(self) -> int:
        """Forgets the names of all blocks, so that nothing is found again; how many had one.

        Requests keep the blocks that they have, shared ones too.
        """
        num_named = sum(len(allocator.name_of) for allocator in self.allocators)
        for allocator in self.allocators:
            allocator.flush()
        self.pool.flush()
        return num_named

    def lose_worker(self, geometry: Geometry = NO_MEMORY, first_step_id: int = 0) -> None:
        """All KV is gone: every running request waits again, plans in flight are forgotten.

        `geometry` is the memory of the worker that comes next, `first_step_id` what its steps are
        counted from. Requests keep every token that has come back; what was sampled but never
        returned is sampled again, to the same end.
        """
        self.in_flight.clear()
        self.transfers = Transfers()
        self.left_out = ()
        self.next_step_id = first_step_id
        self.rows.num_in_flight[:] = 0
        for request in list(self.rows.running.values()):
            if request.row == NO_ROW or self.rows.awaits_fork[request.row]:
                continue  # a sibling leaves with the request that it is to be forked from
            if request.state is RequestState.FINISHED:
                self.release(request)
            else:
                self._requeue(request)
        for request in self.live():
            request.num_in_flight = 0
            request.swapped = request.hit = request.awaited = None
            request.names.clear()
        self._set_memory(geometry)
