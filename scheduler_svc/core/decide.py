"""Chooses what the next step computes. Reads the state, changes nothing, returns a value.

One rule instead of phases: a step schedules `num_tokens - num_computed_tokens` tokens of a
request, cut by the budgets, where num_tokens counts the samples still outstanding. Prefill,
chunked prefill, decode and resuming after a soft reset are the same case; only the order of the
candidates differs (policies.py).

Three budgets bound a step: tokens, requests and pages read. Memory is taken all or nothing per
candidate, over all cache groups. A running request that finds none is stalled; shortage.py
decides who makes room for it. Below the safety margin new prefills wait and decodes go on; the
first candidate of an otherwise empty batch is always let through, so nothing can wedge.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from protos.plan import Int32
from scheduler_svc.core.policies import FIFO, Phase, Policy
from scheduler_svc.core.request import Request
from scheduler_svc.core.room import Room
from scheduler_svc.core.shortage import make_room
from scheduler_svc.core.state import State


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What a step does. Rows of admitted requests are those that `Rows.assign` gives, in order."""

    soft_resets: tuple[Request, ...]  # before anything else; newest first
    admissions: tuple[Request, ...]
    rows: Int32  # [R] in batch order
    num_new_tokens: Int32  # [R]
    new_blocks: Int32  # [G, R]

    @property
    def is_empty(self) -> bool:
        return not len(self.rows) and not self.soft_resets


@dataclass(slots=True)
class _Batch:
    """A decision in the making, and what is left of the budgets."""

    tokens_left: int
    requests_left: int
    pages_left: int
    room: Room
    rows: list[Int32] = field(default_factory=list)
    num_new_tokens: list[Int32] = field(default_factory=list)
    new_blocks: list[Int32] = field(default_factory=list)  # each [G, r]
    admissions: list[Request] = field(default_factory=list)
    stalled: list[tuple[int, int]] = field(default_factory=list)  # (row, tokens it wanted)

    @property
    def is_empty(self) -> bool:
        return not self.rows

    def add(self, rows: Int32, num_new_tokens: Int32, new_blocks: Int32, pages: int) -> None:
        self.rows.append(rows)
        self.num_new_tokens.append(num_new_tokens)
        self.new_blocks.append(new_blocks)
        self.tokens_left -= int(num_new_tokens.sum())
        self.requests_left -= len(rows)
        self.pages_left -= pages
        self.room.take(new_blocks.sum(axis=1).tolist())


def decide(state: State, policy: Policy = FIFO) -> Decision:
    """The next step, given everything the state says; the same state gives the same decision."""
    limits = state.limits
    batch = _Batch(
        tokens_left=limits.max_batch_tokens,
        requests_left=limits.max_requests_per_batch,
        pages_left=limits.cache_budget or sum(a.num_blocks for a in state.allocators),
        room=Room(state),
    )
    has_margin = batch.room.free_share() >= limits.safety_margin
    for phase in policy.phases:
        if phase is Phase.DECODING:
            _add_decoding(state, batch)
        elif phase is Phase.PREFILLING:
            _add_prefilling(state, batch, has_margin)
        elif not batch.stalled:  # what memory there is belongs to those that run
            _add_pending(state, batch, has_margin)
    victims = _relieve(state, batch)
    return Decision(
        soft_resets=tuple(victims),
        admissions=tuple(batch.admissions),
        rows=_joined(batch.rows),
        num_new_tokens=_joined(batch.num_new_tokens),
        new_blocks=(
            np.concatenate(batch.new_blocks, axis=1)
            if batch.new_blocks
            else np.zeros((len(state.allocators), 0), np.int32)
        ),
    )


def candidates(state: State) -> Int32:
    """Running rows that may compute something: not ended, and not sure to end by length."""
    order = state.rows.order()
    rows = state.rows
    to_come = rows.known[order] + rows.outstanding[order] < rows.limit[order]
    chosen: Int32 = order[to_come & ~rows.is_finished[order]]
    return chosen


def blocks_needed(state: State, rows: Int32, num_new_tokens: Int32) -> tuple[Int32, Int32]:
    """New blocks [G, R] for these tokens, and pages read by each row [R]."""
    lengths = state.rows.computed[rows] + num_new_tokens
    tables = np.stack([allocator.blocks_for(lengths) for allocator in state.allocators])
    return tables - state.rows.table_len[:, rows], tables.sum(axis=0)


def _add_decoding(state: State, batch: _Batch) -> None:
    rows = candidates(state)
    rows = rows[state.rows.is_decoding[rows]]
    if not len(rows):
        return
    ones = np.ones(len(rows), np.int32)
    needed, pages = blocks_needed(state, rows, ones)
    if (
        len(rows) <= min(batch.tokens_left, batch.requests_left)
        and pages.sum() <= batch.pages_left
        and batch.room.fits(needed.sum(axis=1).tolist())
    ):
        batch.add(rows, ones, needed, int(pages.sum()))
        return
    for place in range(len(rows)):  # the same rules, one row after the other
        _try_row(state, batch, int(rows[place]), 1)


def _add_prefilling(state: State, batch: _Batch, has_margin: bool) -> None:
    rows = candidates(state)
    for row in rows[~state.rows.is_decoding[rows]].tolist():
        if not has_margin and not batch.is_empty:
            return
        _try_row(state, batch, row, int(state.rows.known[row] - state.rows.computed[row]))


def _add_pending(state: State, batch: _Batch, has_margin: bool) -> None:
    free_rows = iter(state.rows.next_free(min(state.rows.num_free, batch.requests_left)))
    for request in state.pending.in_order():
        if not has_margin and not batch.is_empty:
            return
        if request.num_in_flight or batch.tokens_left == 0 or batch.requests_left == 0:
            return  # in flight: a token of it may still come back
        count = min(len(request.token_ids), batch.tokens_left)
        tables = _blocks_for(state, count)
        pages = sum(tables)
        if not batch.is_empty and pages > batch.pages_left:
            return
        row = next(free_rows, None)
        if row is None or not batch.room.fits(tables):
            return  # whoever waits behind must not overtake: it could starve this one
        batch.admissions.append(request)
        batch.add(
            np.array([row], np.int32),
            np.array([count], np.int32),
            np.array(tables, np.int32)[:, None],
            pages,
        )


def _try_row(state: State, batch: _Batch, row: int, wanted: int) -> None:
    """Adds a running row if the budgets and the memory allow; notes it as stalled for memory."""
    count = min(wanted, batch.tokens_left)
    if count == 0 or batch.requests_left == 0:
        return
    rows, counts = np.array([row], np.int32), np.array([count], np.int32)
    needed, pages = blocks_needed(state, rows, counts)
    if not batch.is_empty and pages[0] > batch.pages_left:
        return
    if batch.room.fits(needed[:, 0].tolist()):
        batch.add(rows, counts, needed, int(pages[0]))
    else:
        batch.stalled.append((row, wanted))


def _relieve(state: State, batch: _Batch) -> list[Request]:
    """Makes room for stalled rows and adds them to the batch; the requests to soft-reset."""
    if not batch.stalled:
        return []
    scheduled = set(_joined(batch.rows).tolist())
    needs = {}
    for row, wanted in batch.stalled:
        count = np.array([min(wanted, state.limits.max_batch_tokens)], np.int32)
        needed, _ = blocks_needed(state, np.array([row], np.int32), count)
        needs[row] = needed[:, 0].tolist()
    victims = make_room(state, batch.room, needs, scheduled)
    reset = {request.row for request in victims}
    stalled, batch.stalled = batch.stalled, []
    for row, wanted in stalled:
        if row not in reset:
            _try_row(state, batch, row, wanted)
    return victims


def _blocks_for(state: State, num_tokens: int) -> list[int]:
    length = np.array([num_tokens], np.int32)
    return [int(allocator.blocks_for(length)[0]) for allocator in state.allocators]


def _joined(arrays: list[Int32]) -> Int32:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
