"""The next step in the making: who computes how much, within the budgets, in blocks of its own.

Rows are added one after the other, or all decoding rows at once; each takes its blocks from the
real memory as it is added, all or nothing over the cache groups. In which order rows are offered
is the policy's (fill.py). A running row that finds no memory is stalled: shortage.py decides who
makes room. Which blocks a row gets is decided last (launch.py), so that nobody's take reclaims
what somebody else's prefix shares in the same step.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from protos.plan import Int32
from scheduler_svc.core.request import Request, Swapped
from scheduler_svc.core.state import State
from scheduler_svc.core.step_time import PromptTime
from scheduler_svc.core.suspects import Cell

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
    num_computed: int  # tokens whose KV that is
    first_pages: tuple[int, ...]  # [G]
    tables: tuple[Int32, ...]  # [G]
    swapped: Swapped | None = None

    @property
    def shared(self) -> list[Int32]:
        """[G]"""
        return [table[table >= 0] for table in self.tables]

    @property
    def num_restored(self) -> list[int]:
        """[G]"""
        return [int((table < 0).sum()) for table in self.tables]


@dataclass(slots=True, eq=False)
class Part:
    """Rows that were added together."""

    rows: Int32  # [R]
    num_new_tokens: Int32  # [R]
    new_blocks: Int32  # [G, R] behind the tables
    tail_copies: npt.NDArray[np.bool_]  # [G, R] the last block is shared: copied before written


class Batch:
    """What the next step computes, as far as it is decided: requests of one cell (suspects.py), or
    anybody's if it is None."""

    def __init__(self, state: State, cell: Cell | None = None) -> None:
        limits = state.limits
        self.state = state
        self.cell = cell
        self.tokens_left = limits.max_batch_tokens
        self.requests_left = limits.max_requests_per_batch
        self.pages_left = limits.cache_budget or sys.maxsize  # then nobody counts
        owners = state.memory.counts.owners if limits.cache_budget else []
        self._is_read = [np.zeros(len(counts), np.bool_) for counts in owners]  # [G][block]
        self.prompt_time: PromptTime | None = None  # None = as long as it takes
        self.free_rows = state.rows.next_free(state.rows.num_free)
        self.victims: list[Request] = []
        self.admissions: list[Admission] = []
        self.parts: list[Part] = []
        self.stalled: list[int] = []  # rows that found no memory
        self.left_out: list[Request] = []  # ran, and found no place in the cache budget
        # (group, block) → rows that get copies of this tail, in order
        self._copies: dict[tuple[int, int], list[Part]] = defaultdict(list)

    @property
    def is_empty(self) -> bool:
        return not self.parts

    @cached_property
    def ran(self) -> list[Request]:
        """Active requests before anybody was admitted or preempted: looked up only when memory is
        short, or the policy asks."""
        assert not self.admissions, "looked up too late"
        return self.state.active()

    @property
    def active(self) -> list[Request]:
        """Who ran when the step began and still does."""
        return [request for request in self.ran if request not in self.victims]

    def has_margin(self) -> bool:
        """Whether so many blocks are free that a new prompt may join."""
        margin = self.state.limits.safety_margin
        needed = margin * FURTHER_SHARE if self.admissions else margin
        return self.state.memory.counts.free_share() >= needed

    def scheduled(self) -> set[int]:
        return {row for part in self.parts for row in part.rows.tolist()}

    def preempt(self, victims: list[Request]) -> None:
        """Gives their rows and blocks to others."""
        self.victims += victims
        self.free_rows += [request.row for request in victims]
        counts = self.state.memory.counts
        for group, block in self._copies:  # it must not be freed while somebody copies it
            counts.share(group, np.array([block], np.int32))
        self.state.preempt(victims)
        for (group, block), parts in list(self._copies.items()):
            if counts.owners[group][block] > 1:
                counts.give(group, np.array([block], np.int32))
                continue
            parts.pop().tail_copies[group, 0] = False  # the last owner has gone: one keeps it
            counts.free_blocks[group] += 1
            if not parts:
                del self._copies[group, block]
        if not self.state.rows.running:
            for request in victims:
                # its blocks lay badly, so they are not to be found again (shortage.py)
                request.may_match = False

    def add_decoding(self, rows: Int32) -> None:
        """The next tokens of these rows: all at once if all fit, else one row after the other."""
        if not len(rows):
            return
        state, memory = self.state, self.state.memory
        counts = np.ones(len(rows), np.int32)
        if state.rows.num_speculating:
            counts += state.rows.num_drafts[rows]
        computed = state.rows.computed[rows]
        needed = memory.blocks_needed(rows, computed + counts)
        has_siblings = state.rows.has_siblings[rows]
        if (
            len(rows) <= self.requests_left
            and int(counts.sum()) <= self.tokens_left
            and self._num_read(rows, needed) <= self.pages_left
            and not (has_siblings.any() and memory.shared_tails(rows, computed).any())
            and memory.device.take(needed.sum(axis=1).tolist())
        ):
            self._add(Part(rows, counts, needed, np.zeros(needed.shape, np.bool_)))
            return
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            self.add_row(row, count)

    def add_row(self, row: int, wanted: int, reserved_tokens: int = 0) -> None:
        """Up to `wanted` tokens of a running row, within budgets and memory.

        It gets fewer when memory for fewer is there; a row that gets none is stalled. Its blocks
        suffice for these tokens, or for `reserved_tokens` if that is more.
        """
        memory, computed = self.state.memory, int(self.state.rows.computed[row])
        is_prompt = not self.state.rows.is_decoding[row]
        count = min(self._cut(wanted, computed) if is_prompt else wanted, self.tokens_left)
        if count == 0 or self.requests_left == 0:
            return
        rows = np.array([row], np.int32)
        tails = np.zeros((len(memory.groups), 1), np.bool_)
        if self.state.rows.has_siblings[row]:
            tails = memory.shared_tails(rows, np.array([computed], np.int32))
        while count:
            length = np.array([max(computed + count, reserved_tokens)], np.int32)
            needed = memory.blocks_needed(rows, length)
            if not self.is_empty and self._num_read(rows, needed + tails) > self.pages_left:
                self.left_out.append(self.state.rows.running[row])
                return
            if memory.device.take((needed + tails)[:, 0].tolist()):
                part = Part(rows, np.array([count], np.int32), needed, tails)
                self._add(part)
                if is_prompt:
                    self._spend(count, computed)
                self._leave_tails(part, computed)
                return
            count //= 2
        self.stalled.append(row)

    def admit(self, admission: Admission, wanted: int, reserved_tokens: int = 0) -> bool:
        """A waiting request with up to `wanted` tokens; False when it must keep waiting.

        It gets blocks for these tokens, or for `reserved_tokens` if that is more. If others compute
        already it gets all of them or none.
        """
        request, memory, computed = admission.request, self.state.memory, admission.num_computed
        count = min(self._cut(wanted, computed), self.tokens_left)
        if self.requests_left == 0:
            return False
        shared, restored = admission.shared, admission.num_restored
        ends = [f + len(t) for f, t in zip(admission.first_pages, admission.tables, strict=True)]
        while count:
            pages = -(-max(computed + count, reserved_tokens) // memory.page_size)
            needed = [max(0, pages - end) for end in ends]
            num_read = self._num_read_by_new(admission, needed)
            if not self.is_empty and num_read > self.pages_left:
                return False
            if memory.device.take([n + r for n, r in zip(needed, restored, strict=True)], shared):
                break
            count = count // 2 if self.is_empty else 0
        else:
            return False
        self.assign(admission)
        part = Part(
            np.array([request.row], np.int32),
            np.array([count], np.int32),
            np.array(needed, np.int32)[:, None],
            np.zeros((len(needed), 1), np.bool_),
        )
        self._add(part, admission)
        self._spend(count, computed)
        return True

    def assign(self, admission: Admission) -> None:
        """The admission's blocks have been taken: it and its siblings get rows."""
        request, memory = admission.request, self.state.memory
        num_rows = 1 + len(request.siblings)
        self.state.admit(request, self.free_rows[:num_rows], admission.num_computed)
        del self.free_rows[:num_rows]
        for group, blocks in enumerate(admission.tables):
            memory.tables.set(group, request.row, admission.first_pages[group], blocks)
        if admission.swapped is None:
            pages = admission.num_computed // memory.page_size
            self.state.rows.published[request.row] = pages
            if self.state.limits.allow_block_sharing:
                memory.prefix_cache.promise(request, pages)
        self.admissions.append(admission)

    def _add(self, part: Part, admission: Admission | None = None) -> None:
        self.parts.append(part)
        self.tokens_left -= int(part.num_new_tokens.sum())
        self.requests_left -= len(part.rows)
        if self.pages_left == sys.maxsize:
            return
        if admission is None:
            self.pages_left -= self._num_read(part.rows, part.new_blocks + part.tail_copies)
            tables = self._tables(part.rows)
        else:
            self.pages_left -= self._num_read_by_new(admission, part.new_blocks[:, 0].tolist())
            tables = admission.shared
        for is_read, table in zip(self._is_read, tables, strict=True):
            is_read[table] = True

    def _leave_tails(self, part: Part, computed: int) -> None:
        """The row gets copies of its shared tails: it owns them no more, so that the last of those
        who share one needs no copy."""
        for group in np.flatnonzero(part.tail_copies[:, 0]).tolist():
            tables = self.state.memory.tables.blocks
            tail = tables[group, part.rows[0], computed // self.state.memory.page_size]
            self.state.memory.counts.give(group, tail[None])
            self._copies[group, int(tail)].append(part)

    def _cut(self, wanted: int, num_computed: int) -> int:
        return self.prompt_time.cut(wanted, num_computed) if self.prompt_time else wanted

    def _spend(self, num_tokens: int, num_computed: int) -> None:
        if self.prompt_time:
            self.prompt_time.spend(num_tokens, num_computed)

    def _num_read(self, rows: Int32, new_blocks: Int32) -> int:
        """Pages that the step reads for these running rows, and for nobody chosen so far; each
        once, however many rows share it. new_blocks: [G, R]"""
        if self.pages_left == sys.maxsize:
            return 0
        shared = zip(self._is_read, self._tables(rows), strict=True)
        tables = [table[~is_read[table]] for is_read, table in shared]
        if len(rows) > 1:
            tables = [np.unique(table) for table in tables]
        return int(new_blocks.sum()) + sum(map(len, tables))

    def _num_read_by_new(self, admission: Admission, new_blocks: list[int]) -> int:
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
        tables = self.state.memory.tables
        if len(rows) == 1:
            return tables.of_row(int(rows[0]))
        start, blocks = tables.flat(rows)
        return [blocks[first:end] for first, end in zip(start[:, 0], start[:, -1], strict=True)]
