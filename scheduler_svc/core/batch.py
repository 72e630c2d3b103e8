"""A decision in the making: what was chosen so far, and what is left of budgets and memory.

The rules for adding one row, or many decoding rows at once, are here; in which order rows are
offered is decide.py's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protos.plan import Int32
from scheduler_svc.core.request import Request, Swapped
from scheduler_svc.core.room import Room
from scheduler_svc.core.state import State
from scheduler_svc.core.step_time import PromptTime


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
        self.pages_left = limits.cache_budget or sum(a.num_blocks for a in state.allocators)
        self.prompt_time: PromptTime | None = None  # None = as long as it takes
        self.room = Room(state.allocators)
        self.admissions: list[Admission] = []
        self.stalled: list[int] = []  # rows that found no memory
        self.is_over_budget = False  # a running row found no place in the cache budget
        self._parts: list[_Part] = []

    @property
    def is_empty(self) -> bool:
        return not self._parts

    def scheduled(self) -> set[int]:
        return {row for part in self._parts for row in part.rows.tolist()}

    def add_decoding(self, rows: Int32) -> None:
        """One token for each of these rows: all at once if all fit, else one after the other."""
        if not len(rows):
            return
        ones = np.ones(len(rows), np.int32)
        needed, pages = blocks_needed(self._state, rows, ones)
        if (
            len(rows) <= min(self.tokens_left, self.requests_left)
            and pages.sum() <= self.pages_left
            and not (self._state.rows.has_siblings[rows].any() and self._shared_tails(rows).any())
            and self.room.fits(needed.sum(axis=1).tolist())
        ):
            self._add(_Part(rows, ones, needed, np.zeros_like(needed)), int(pages.sum()))
            return
        for row in rows.tolist():
            self.add_row(row, 1)

    def add_row(self, row: int, wanted: int, reserved_tokens: int = 0) -> None:
        """Up to so many tokens of a running row, if budgets and memory allow.

        A prefill takes fewer when memory for fewer is there; a row that gets none is stalled.
        It gets blocks for these tokens, or for `reserved_tokens` if that is more.
        """
        num_computed = int(self._state.rows.computed[row])
        is_prompt = not self._state.rows.is_decoding[row]
        count = min(self._cut(wanted, num_computed) if is_prompt else wanted, self.tokens_left)
        if count == 0 or self.requests_left == 0:
            return
        rows = np.array([row], np.int32)
        tails = self._tail_copies(row)
        while count:
            counts = np.array([count], np.int32)
            needed, pages = blocks_needed(self._state, rows, counts, reserved_tokens)
            if not self.is_empty and pages[0] > self.pages_left:
                self.is_over_budget = True
                return
            if self.room.fits((needed + tails)[:, 0].tolist()):
                self._add(_Part(rows, counts, needed, tails), int(pages[0]))
                if is_prompt:
                    self._spend(count, num_computed)
                for group in np.flatnonzero(tails[:, 0]).tolist():
                    self.room.give(group, np.array([self._tail(group, row)], np.int32))
                return
            count //= 2
        self.stalled.append(row)

    def admit(self, admission: Admission, wanted: int, reserved_tokens: int = 0) -> bool:
        """A waiting request with up to so many tokens; False when it must wait on.

        It gets blocks for these tokens, or for `reserved_tokens` if that is more.
        """
        state = self._state
        count = min(self._cut(wanted, admission.num_computed), self.tokens_left)
        if count == 0 or self.requests_left == 0:
            return False
        room = self.room.copy()
        for group, table in enumerate(admission.tables):
            if not room.share(group, table[table >= 0]):
                return False
        restored = [int((table < 0).sum()) for table in admission.tables]
        ends = [f + len(t) for f, t in zip(admission.first_pages, admission.tables, strict=True)]
        while count:
            length = admission.num_computed + count
            pages = -(-max(length, reserved_tokens) // state.geometry.page_size)
            needed = [max(0, pages - end) for end in ends]
            read = sum(pages - first for first in admission.first_pages)
            if not self.is_empty and read > self.pages_left:
                return False
            if room.fits([n + r for n, r in zip(needed, restored, strict=True)]):
                break
            count = count // 2 if self.is_empty else 0
        if not count:
            return False
        room.take(restored)
        self.room = room
        self.admissions.append(admission)
        blocks = np.array(needed, np.int32)[:, None]
        part = _Part(
            np.array(admission.rows[:1], np.int32),
            np.array([count], np.int32),
            blocks,
            np.zeros_like(blocks),
        )
        self._add(part, read)
        self._spend(count, admission.num_computed)
        return True

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
        )

    def _add(self, part: _Part, pages: int) -> None:
        self._parts.append(part)
        self.tokens_left -= int(part.num_new_tokens.sum())
        self.requests_left -= len(part.rows)
        self.pages_left -= pages
        self.room.take((part.new_blocks + part.tail_copies).sum(axis=1).tolist())

    def _cut(self, wanted: int, num_computed: int) -> int:
        return self.prompt_time.cut(wanted, num_computed) if self.prompt_time else wanted

    def _spend(self, num_tokens: int, num_computed: int) -> None:
        if self.prompt_time:
            self.prompt_time.spend(num_tokens, num_computed)

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


def blocks_needed(
    state: State, rows: Int32, num_new_tokens: Int32, reserved_tokens: int = 0
) -> tuple[Int32, Int32]:
    """New blocks [G, R] behind the tables for these tokens, and pages read by each row [R].

    A table reaches at least to `reserved_tokens` of its row.
    """
    page_size = np.int32(state.geometry.page_size)
    lengths = state.rows.computed[rows] + num_new_tokens
    if reserved_tokens:
        lengths = np.maximum(lengths, np.int32(reserved_tokens))
    pages = (lengths + (page_size - np.int32(1))) // page_size
    needed = np.maximum(pages - state.rows.table_len[:, rows], 0)
    read = (pages - state.rows.table_first[:, rows]).sum(axis=0)
    return needed, read
