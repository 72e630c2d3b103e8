"""The state of every live request, and the operations that move one between states.

    submit ─▶ PENDING ──admit──▶ PREFILLING ──last chunk planned──▶ DECODING ──▶ FINISHED
                 ▲                    │                                 │
                 └─────── preempt ────┴─────────────────────────────────┘

A finished request keeps its row and blocks until the last plan that names it has returned. Only
`release` frees rows and tables.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduler_svc.core.beams import BeamGroup, Search
from scheduler_svc.core.in_flight import InFlight as InFlight
from scheduler_svc.core.limits import NO_MEMORY, Geometry, Limits
from scheduler_svc.core.memory.cache_events import CacheEvents
from scheduler_svc.core.memory.kv_memory import KvMemory
from scheduler_svc.core.pending import PendingQueue
from scheduler_svc.core.policies import Policy
from scheduler_svc.core.request import NO_ROW, FinishReason, NewRequest, Request, RequestState
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.step_time import StepCost, aim_of
from scheduler_svc.core.suspects import Suspects


@dataclass(slots=True)
class Counters:
    """Events since the start, for the operator."""

    soft_resets: int = 0
    offloads: int = 0
    restores: int = 0
    drafted: int = 0  # draft tokens verified
    accepted: int = 0  # of these, those that were right


class State:
    """The scheduler's state; scheduler.py and step/ change it."""

    holds_ended = False  # whether rows are released together: see static_batches.py

    def __init__(self, limits: Limits, geometry: Geometry, policy: Policy) -> None:
        self.limits = limits
        self.policy = policy
        # request_id → the live ones of the request and its siblings; in order of arrival
        self.requests: dict[str, list[Request]] = {}
        self.num_live = 0  # requests and siblings
        self.pending = PendingQueue()
        self.suspects = Suspects()
        self.counters = Counters()
        self.next_ticket = 0
        self.next_step_id = 0
        self.in_flight: deque[InFlight] = deque()
        self.cache_events: CacheEvents | None = None  # None = nobody has listened yet
        # running, but beyond the last plan's cache budget; longest wait first
        self.left_out: tuple[Request, ...] = ()
        self.step_cost = StepCost(aim_of(limits.target_step_ms, geometry.device), geometry.device)
        self._set_memory(geometry)

    def listen_to_cache(self) -> CacheEvents:
        """Records what the prefix cache stores and drops, from the first call on."""
        if self.cache_events is None:
            self.cache_events = CacheEvents()
            self.memory.prefix_cache.report_to(self.cache_events)
        return self.cache_events

    @property
    def plans_allowed(self) -> int:
        """The limit of plans in flight; 1 while a request is suspected (suspects.py)."""
        return 1 if self.suspects.is_active else self.limits.max_plans_in_flight

    def _set_memory(self, geometry: Geometry) -> None:
        self.geometry = geometry
        num_rows = self.limits.max_requests_per_batch
        self.memory = KvMemory(geometry, num_rows, geometry.pool_tokens(self.holds_ended))
        if self.cache_events is not None:
            self.memory.prefix_cache.report_to(self.cache_events)
        self.rows = Rows(num_rows)
        # what was learned of the same device stays valid
        if geometry.groups and geometry.device != self.step_cost.device:
            aim = aim_of(self.limits.target_step_ms, geometry.device)
            self.step_cost = StepCost(aim, geometry.device)

    def submit(self, new: NewRequest) -> list[Request]:
        """Queues a request; returns it and its siblings, one for each answer. A resumed answer that
        was complete has ended: it is FINISHED, and no result will tell of it."""
        assert new.request_id not in self.requests, f"request {new.request_id} is live already"
        assert new.n == 1 or not new.output_token_ids, f"n is {new.n} of a resumed answer"
        assert len(new.output_token_ids) <= new.max_tokens, "resumed past the end"
        assert new.n == 1 or new.max_tokens, f"n is {new.n} with max_tokens 0; allowed: 1"
        num_members = new.n if new.beams is None else new.beams.width
        assert new.beams is None or (new.n == 1 and new.max_tokens and not self.holds_ended)
        assert new.beams is None or not (new.output_token_ids or new.speculate or new.index)
        token_ids = [*new.prompt_token_ids, *new.output_token_ids]
        first = Request(
            request_id=new.request_id,
            ticket=self.next_ticket,
            token_ids=token_ids,
            num_prompt_tokens=len(new.prompt_token_ids),
            max_total_tokens=len(new.prompt_token_ids) + new.max_tokens,
            # a beam's sample is not used: the greedy one costs least
            sampling=new.sampling if new.beams is None else replace(new.sampling, temperature=0.0),
            priority=new.priority,
            cache_salt=new.cache_salt,
            speculate=0 if self.holds_ended else new.speculate,  # a static batch verifies nothing
            index=new.index,
            prompt_logprobs=None if new.output_token_ids else new.prompt_logprobs,
            is_constrained=new.is_constrained,
            first_tokens=np.array(token_ids, np.int32),
        )
        if self.limits.allow_block_sharing and self.memory.groups:
            self.memory.prefix_cache.name_first_tokens(first)
        first.siblings = [
            replace(
                first,
                index=new.index + number,
                ticket=first.ticket + number,
                token_ids=list(first.token_ids),
                siblings=[],
                names=list(first.names),
                prompt_logprobs=None,  # one scores the prompt for all
                scores=[],
                prompt_scores=[],
            )
            for number in range(1, num_members)
        ]
        self.next_ticket += num_members
        self.num_live += num_members
        family = [first, *first.siblings]
        if new.beams is not None:
            group = BeamGroup(
                Search(
                    new.beams, new.max_tokens, new.sampling.stop_token_ids, new.sampling.logprobs
                ),
                family,
            )
            for member in family:
                member.beams = group
        self.requests[new.request_id] = list(family)
        self.pending.add(first, self.policy.urgency(first))
        if new.output_token_ids:
            self.finish_if_complete(first)
        return family[: new.num_answers]

    def live(self) -> Iterator[Request]:
        """The live requests and siblings, in order of arrival."""
        return itertools.chain.from_iterable(self.requests.values())

    def active(self) -> list[Request]:
        """Running, unfinished requests in order of admission, without siblings to be forked off."""
        return [
            request
            for row, request in self.rows.running.items()
            if request.state is not RequestState.FINISHED and not self.rows.awaits_fork[row]
        ]

    def num_queued(self) -> int:
        """Number of pending requests beyond the free rows."""
        free = self.rows.num_free
        in_use = self.rows.in_use()
        num_running = len(in_use) - int(self.rows.is_finished[in_use].sum())
        if self.num_live - num_running <= free:
            return 0
        num_queued = len(self.pending)
        for request in self.pending.in_order():
            free -= 1 + len(request.siblings)
            if free < 0:
                break
            num_queued -= 1
        return num_queued

    def admit(self, request: Request, rows: Sequence[int], computed: int) -> None:
        """Assigns rows to a pending request and its siblings; `computed` of its tokens have KV. It
        stays queued until the step is complete, as the queue is being iterated."""
        request.state = RequestState.PREFILLING
        request.may_match = True
        request.hit = None
        row, *sibling_rows = rows
        self.rows.assign(request, row)
        self.rows.computed[row] = computed
        if not request.was_admitted:
            request.was_admitted = True
            if self.limits.allow_block_sharing:
                request.num_cached_tokens = min(computed, request.num_prompt_tokens)
                self.memory.prefix_cache.count(request, request.num_cached_tokens)
        for sibling, sibling_row in zip(request.siblings, sibling_rows, strict=True):
            self.rows.assign(sibling, sibling_row)
            self.rows.await_fork(sibling_row)
            sibling.was_admitted = True  # one look-up serves all siblings
            sibling.num_cached_tokens = request.num_cached_tokens
            sibling.state = RequestState.PREFILLING

    def finish_if_complete(self, request: Request) -> bool:
        """Ends a live request whose last token is a stop token, or that has all its tokens and
        scores; False if it goes on."""
        token_id = request.token_ids[-1]
        if request.num_output_tokens and token_id in request.sampling.stop_token_ids:
            self.finish(request, FinishReason.STOP, token_id)
        elif len(request.token_ids) == request.max_total_tokens and not request.num_unscored:
            self.finish(request, FinishReason.LENGTH)
        else:
            return False
        return True

    def finish(
        self, request: Request, reason: FinishReason, stop_token_id: int | None = None
    ) -> None:
        """Ends a live request in any state; siblings not yet forked end with it. A beam search ends
        as a whole, and without an answer."""
        if request.beams is None:
            self.finish_member(request, reason, stop_token_id)
            return
        for member in request.beams.members:
            member.siblings = []
            del member.token_ids[member.num_prompt_tokens :]
            self.finish_member(member, reason)

    def finish_member(
        self, request: Request, reason: FinishReason, stop_token_id: int | None = None
    ) -> None:
        """Ends a live request; of a beam search only this member, the caller ends the others."""
        assert request.state is not RequestState.FINISHED, f"request {request.name} ended already"
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
        self.suspects.remove(request, is_last=not family)
        siblings, request.siblings = request.siblings, []
        for sibling in siblings:
            self.finish_member(sibling, reason)
        if request.row != NO_ROW:
            self.rows.finish(request.row)
            self.release_ended([request])

    def release_ended(self, requests: Sequence[Request]) -> None:
        """Releases those of these finished requests that no plan in flight names."""
        for request in requests:
            if request.row != NO_ROW and self.rows.num_in_flight[request.row] == 0:
                self.release(request)

    def release(self, request: Request) -> None:
        """Frees a running request's blocks and row, and the rows of siblings not yet forked."""
        self.memory.prefix_cache.break_promises(request)
        self.memory.release_row(request.row)
        self.rows.vacate(request)
        for sibling in request.siblings:
            if sibling.row != NO_ROW:
                self.rows.vacate(sibling)
                sibling.state = RequestState.PENDING

    def preempt(self, victims: Sequence[Request]) -> None:
        """Frees the rows and blocks of running requests, which return to their old queue places.

        If the swap pool has room, the next plan copies their KV there (offload), including what
        plans in flight compute; else they keep only their tokens (soft reset). Rows and blocks are
        free at once although plans in flight name them: the worker executes plans in order, so the
        next owner writes after those have read.
        """
        for request in victims:
            if request.beams is not None:
                if request.row != NO_ROW:  # not preempted with another member
                    self._preempt_beams(request.beams)
                continue
            row = request.row
            computed = int(self.rows.computed[row])
            if self.rows.is_verifying(row):  # KV of drafts may be wrong
                computed = int(self.rows.known[row])
                self.memory.release_tail(row, computed)
            if not request.siblings:
                request.swapped = self.memory.swap_out(request, computed)
            if request.swapped is None:
                self.counters.soft_resets += 1
            else:
                self.counters.offloads += 1
            self._requeue(request)
            request.num_preemptions += 1

    def _preempt_beams(self, group: BeamGroup[Request]) -> None:
        """Preempts all beams of a search. What they have in common may go to the swap pool but for
        its last token: the leader computes that one again, and then forks the others off."""
        is_forked = self._gather_beams(group)
        leader, kept = group.leader, len(group.leader.token_ids) - 1
        if is_forked and kept and self.memory.holds_window(leader.row, kept):
            self.memory.release_tail(leader.row, kept)
            leader.swapped = self.memory.swap_out(leader, kept)
        if leader.swapped is None:
            self.counters.soft_resets += 1
        else:
            self.counters.offloads += 1
        self._requeue(leader)
        for member in group.members:
            member.num_preemptions += 1

    def _gather_beams(self, group: BeamGroup[Request]) -> bool:
        """Takes their rows and blocks from all members of a forked group but one: the leader, left
        with the tokens that all beams have in common. The others are its siblings again. False if
        the group has not forked."""
        if not group.holders:
            return False
        leader = group.leader = group.holders[0]
        leader.token_ids = group.tokens_in_common()
        leader.history = None
        del leader.names[len(leader.token_ids) // self.memory.page_size :]
        leader.siblings = [member for member in group.members if member is not leader]
        for member in leader.siblings:
            self.release(member)
            member.state = RequestState.PENDING
        group.holders = []
        group.arrived.clear()
        return True

    def _requeue(self, request: Request) -> None:
        """Takes its row and blocks from a running request, which waits again."""
        self.release(request)
        request.state = RequestState.PENDING
        request.drafts = ()
        self.pending.add(request, self.policy.urgency(request))

    def recall_offloads(self) -> bool:
        """Turns the offloads that no plan has carried into soft resets, as no step can be planned
        while their blocks are quarantined. False if there are none."""
        recalled = [request for request, _ in self.memory.transfers.quarantined]
        for request in recalled:
            self.drop_swapped(request)
            self.counters.offloads -= 1
            self.counters.soft_resets += 1
        return bool(recalled)

    def drop_swapped(self, request: Request) -> None:
        """Frees the swap blocks of a request, if it is offloaded; with plans in flight, once the
        newest of them has returned."""
        swapped, request.swapped = request.swapped, None
        if swapped is None:
            return
        self.memory.cancel_swap_out(request, swapped)
        if self.in_flight:
            self.in_flight[-1].freed_swap.append(swapped.blocks)
        else:
            self.memory.free_swap(swapped.blocks)

    def lose_worker(self, geometry: Geometry = NO_MEMORY, first_step_id: int = 0) -> None:
        """Drops all KV and the plans in flight; running requests are pending again."""
        self.in_flight.clear()
        self.memory.take_transfers()
        self.left_out = ()
        self.next_step_id = first_step_id
        self.rows.num_in_flight[:] = 0
        for request in list(self.rows.running.values()):
            if request.row == NO_ROW or self.rows.awaits_fork[request.row]:
                continue  # released with the request that it is to be forked from
            if request.state is RequestState.FINISHED:
                self.release(request)
                continue
            if request.beams is not None:
                self._gather_beams(request.beams)
                request = request.beams.leader
            self._requeue(request)
        for request in self.live():
            request.num_in_flight = 0
            request.swapped = request.hit = request.awaited = None
            request.names.clear()
        self._set_memory(geometry)
