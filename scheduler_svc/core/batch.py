"""A decision in the making: what was chosen so far, and what is left of budgets and memory.

The rules for adding one row, or many decoding rows at once, are here; in which order rows are
offered is decide.py's.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from protos.plan import Int32
from scheduler_svc.core.request import Request, Swapped
from scheduler_svc.core.room import Room
from scheduler_svc.core.state import State

# Of the margin, what must be free for a further newcomer of the same step. Simulated bursts and
# steady loads: with 0 a burst fills the pool, and up to a tenth of all tokens is computed again;
# with 1 hardly any, but steps have fewer rows, and there are up to a tenth more of them; with 2/3
# either is about as good as it gets.
FURTHER_SHARE: Final = 2 / 3


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """A waiting request that gets a row, and the KV it begins with.

    `tables` has for each group the blocks of pages first_pages[g] on: those to share with their
    owners or with the prefix cache, and -1 where the content comes back from the swap pool.
    """

    request: Request
    rows: tuple[int, ...]  # its own, then one for each of its siblings
    num_computed: int  # tokens whose KV that is
    first_pages: tuple[int, ...]  # [G]
    tables: tuple[Int32, ...]  # [G]
    swapped: Swapped | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What a step does."""

    soft_resets: tuple[Request, ...]  # these two before anything else
    offloads: tuple[Request, ...]
    admissions: tuple[Admission, ...]
    rows: Int32  # [R] in batch order
    num_new_tokens: Int32  # [R]
    new_blocks: Int32  # [G, R] behind the tables
    tail_copies: Int32  # [G, R] 1 = the last block is shared and gets copied before it is written
    left_out: tuple[Request, ...] = ()  # ran, and found no place in the cache budget

    @property
    def is_empty(self) -> bool:
        return not (len(self.rows) or self.soft_resets or self.offloads)


@dataclass(slots=True)
class _Part:
    rows: Int32
    num_new_tokens: Int32
    new_blocks: Int32  # [G, r]
    tail_copies: Int32  # [G, r]


class Batch:
    """What the next step computes, as far as it is decided."""

    def __init__(self, state: State) -> None:
        limits = state.limits
        self._state = state
        self.tokens_left = limits.max_batch_tokens
        self.requests_left = limits.max_requests_per_batch
        self.pages_left = limits.cache_budget or sys.maxsize  # then nobody counts
        self._is_read = [np.zeros(0, np.bool_)] * len(state.allocators)  # [G][block] counted
        if limits.cache_budget:
            self._is_read = [np.zeros(len(a.owners), np.bool_) for a in state.allocators]
        self.room = Room(state.allocators)
        self.admissions: list[Admission] = []
        self.stalled: list[int] = []  # rows that found no memory
        self.left_out: list[int] = []  # running rows that found no place in the cache budget
        self._parts: list[_Part] = []

    @property
    def is_empty(self) -> bool:
        return not self._parts

    def has_margin(self) -> bool:
        """Whether so many blocks are free that a new prompt may join."""
        margin = self._state.limits.safety_margin
        return self.room.free_share() >= (margin * FURTHER_SHARE if self.admissions else margin)

    def scheduled(self) -> set[int]:
        return {row for part in self._parts for row in part.rows.tolist()}

    def add_decoding(self, rows: Int32) -> None:
        """One token for each of these rows: all at once if all fit, else one after the other."""
        if not len(rows):
            return
        ones = np.ones(len(rows), np.int32)
        needed = blocks_needed(self._state, rows, ones)
        if (
            len(rows) <= min(self.tokens_left, self.requests_left)
            and self._read_by(rows, needed) <= self.pages_left
            and not (self._state.rows.has_siblings[rows].any() and self._shared_tails(rows).any())
            and self.room.fits(needed.sum(axis=1).tolist())
        ):
            self._add(_Part(rows, ones, needed, np.zeros_like(needed)))
            return
        for row in rows.tolist():
            self.add_row(row, 1)

    def add_row(self, row: int, wanted: int) -> None:
        """Up to so many tokens of a running row, if budgets and memory allow.

        A prefill takes fewer when memory for fewer is there; a row that gets none is stalled.
        """
        count = min(wanted, self.tokens_left)
        if count == 0 or self.requests_left == 0:
            return
        rows = np.array([row], np.int32)
        tails = self._tail_copies(row)
        while count:
            counts = np.array([count], np.int32)
            needed = blocks_needed(self._state, rows, counts)
            if not self.is_empty and self._read_by(rows, needed + tails) > self.pages_left:
                self.left_out.append(row)
                return
            if self.room.fits((needed + tails)[:, 0].tolist()):
                self._add(_Part(rows, counts, needed, tails))
                for group in np.flatnonzero(tails[:, 0]).tolist():
                    self.room.give(group, np.array([self._tail(group, row)], np.int32))
                return
            count //= 2
        self.stalled.append(row)

    def admit(self, admission: Admission, wanted: int, reserved_tokens: int = 0) -> bool:
        """A waiting request with up to so many tokens; False when it must wait on.

        It gets blocks for these tokens, or for `reserved_tokens` if that is more.
        """
        count = min(wanted, self.tokens_left)
        if count == 0 or self.requests_left == 0:
            return False
        shared = [table[table >= 0] for table in admission.tables]
        restored = [int((table < 0).sum()) for table in admission.tables]
        if not self._fitting(admission, count, reserved_tokens, restored)[0]:
            return False  # what it shares only takes more room
        needed: list[int] = []
        has_shared = [self.room.share(group, blocks) for group, blocks in enumerate(shared)]
        if all(has_shared):
            count, needed = self._fitting(admission, count, reserved_tokens, restored)
        if not (all(has_shared) and count):
            for group, blocks in enumerate(shared):
                self.room.give(group, blocks)
            return False
        self.room.take(restored)
        self.admissions.append(admission)
        new_blocks = np.array(needed, np.int32)[:, None]
        part = _Part(
            np.array(admission.rows[:1], np.int32),
            np.array([count], np.int32),
            new_blocks,
            np.zeros_like(new_blocks),
        )
        self._add(part, admission)
        return True

    def _fitting(
        self, admission: Admission, count: int, reserved_tokens: int, restored: list[int]
    ) -> tuple[int, list[int]]:
        """How many of so many tokens find room, and the blocks [G] that they need: all of them,
        or as many as there is room for if the batch is empty; else 0."""
        ends = [f + len(t) for f, t in zip(admission.first_pages, admission.tables, strict=True)]
        while count:
            length = max(admission.num_computed + count, reserved_tokens)
            pages = -(-length // self._state.geometry.page_size)
            needed = [max(0, pages - end) for end in ends]
            if not self.is_empty and self._read_by_new(admission, needed) > self.pages_left:
                break
            if self.room.fits([n + r for n, r in zip(needed, restored, strict=True)]):
                return count, needed
            count = count // 2 if self.is_empty else 0
        return 0, []

    def decision(self, soft_resets: list[Request], offloads: list[Request]) -> Decision:
        groups = len(self._state.allocators)
        nothing, no_blocks = np.zeros(0, np.int32), np.zeros((groups, 0), np.int32)
        parts = self._parts or [_Part(nothing, nothing, no_blocks, no_blocks)]
        whole = parts[0]
        if len(parts) > 1:
            whole = _Part(
                np.concatenate([part.rows for part in parts]),
                np.concatenate([part.num_new_tokens for part in parts]),
                np.concatenate([part.new_blocks for part in parts], axis=1),
                np.concatenate([part.tail_copies for part in parts], axis=1),
            )
        return Decision(
            soft_resets=tuple(soft_resets),
            offloads=tuple(offloads),
            admissions=tuple(self.admissions),
            rows=whole.rows,
            num_new_tokens=whole.num_new_tokens,
            new_blocks=whole.new_blocks,
            tail_copies=whole.tail_copies,
            left_out=tuple(self._state.rows.running[row] for row in self.left_out),
        )

    def _add(self, part: _Part, admission: Admission | None = None) -> None:
        self._parts.append(part)
        self.tokens_left -= int(part.num_new_tokens.sum())
        self.requests_left -= len(part.rows)
        new_blocks = part.new_blocks + part.tail_copies
        self.room.take(new_blocks.sum(axis=1).tolist())
        if self.pages_left == sys.maxsize:
            return
        if admission is None:
            self.pages_left -= self._read_by(part.rows, new_blocks)
            tables = self._tables(part.rows)
        else:
            self.pages_left -= self._read_by_new(admission, part.new_blocks[:, 0].tolist())
            tables = [table[table >= 0] for table in admission.tables]
        for is_read, table in zip(self._is_read, tables, strict=True):
            is_read[table] = True

    def _read_by(self, rows: Int32, new_blocks: Int32) -> int:
        """Pages that the step reads for these running rows, and for nobody chosen so far; each
        once, however many rows share it. new_blocks: [G, R]"""
        if self.pages_left == sys.maxsize:
            return 0
        shared = zip(self._is_read, self._tables(rows), strict=True)
        tables = [table[~is_read[table]] for is_read, table in shared]
        if len(rows) > 1:
            tables = [np.unique(table) for table in tables]
        return int(new_blocks.sum()) + sum(map(len, tables))

    def _read_by_new(self, admission: Admission, new_blocks: list[int]) -> int:
        """The same for a waiting request. new_blocks: [G]"""
        if self.pages_left == sys.maxsize:
            return 0
        counts = [
            len(table) - int(is_read[table[table >= 0]].sum())
            for is_read, table in zip(self._is_read, admission.tables, strict=True)
        ]
        return sum(new_blocks) + sum(counts)

    def _tables(self, rows: Int32) -> list[Int32]:
        """The rows' blocks of each group, one row after another. [G][blocks]"""
        if len(rows) == 1:
            row = int(rows[0])
            return [self._state.rows.blocks_of(g, row) for g in range(len(self._is_read))]
        start, blocks = self._state.rows.tables(rows)
        return [blocks[first:end] for first, end in zip(start[:, 0], start[:, -1], strict=True)]

    def _shared_tails(self, rows: Int32) -> npt.NDArray[np.bool_]:
        """Which rows' next token goes into a block that somebody else owns too. [G, R]"""
        table = self._state.rows
        computed = table.computed[rows]
        is_partial = computed % self._state.geometry.page_size != 0
        page = np.minimum(computed // self._state.geometry.page_size, table.table.shape[2] - 1)
        return np.stack(
            [
                is_partial & (allocator.owners[table.table[group, rows, page]] > 1)
                for group, allocator in enumerate(self._state.allocators)
            ]
        )

    def _tail_copies(self, row: int) -> Int32:
        """1 per group whose tail block must be copied, given who copied in this batch. [G, 1]"""
        if not self._state.rows.has_siblings[row]:
            return np.zeros((len(self._state.allocators), 1), np.int32)
        shared = self._shared_tails(np.array([row], np.int32))
        for group in np.flatnonzero(shared[:, 0]).tolist():
            shared[group, 0] = self.room.owners(group, self._tail(group, row)) > 1
        return shared.astype(np.int32)

    def _tail(self, group: int, row: int) -> int:
        return self._state.rows.tail_block(group, row, self._state.geometry.page_size)


def blocks_needed(state: State, rows: Int32, num_new_tokens: Int32) -> Int32:
    """New blocks behind the tables for these tokens. [G, R]"""
    page_size = np.int32(state.geometry.page_size)
    lengths = state.rows.computed[rows] + num_new_tokens
    pages = (lengths + (page_size - np.int32(1))) // page_size
    needed: Int32 = np.maximum(pages - state.rows.table_len[:, rows], 0)
    return needed
