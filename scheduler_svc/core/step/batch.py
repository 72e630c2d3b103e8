"""The step being built: which rows compute how many tokens, within the budgets and with blocks.

Rows are added one by one, or all decoding rows at once, in the policy's order (fill.py). Each takes
its blocks when it is added, all or nothing over the cache groups; a running row that finds none is
stalled (shortage.py). Taking only counts: launch.py picks the blocks last, so that none is
reclaimed whose content another row of the same step shares.
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

# Share of the margin that must be free for each further admission of a step. In simulated bursts
# and steady loads, with 0 a burst fills the pool and up to a tenth of all tokens is recomputed;
# with 1 hardly any is, but there are up to a tenth more steps, with fewer rows; 2/3 balances both.
FURTHER_SHARE: Final = 2 / 3


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """A waiting request to get a row, and the KV that it starts with.

    tables[g] has the blocks of the pages from first_pages[g] on: those shared with other requests
    or the prefix cache, and -1 where the swap pool has the content.
    """

    request: Request
    num_computed: int  # tokens of that KV
    first_pages: tuple[int, ...]  # [G]
    tables: tuple[Int32, ...]  # [G]
    swapped: Swapped | None = None

    @property
    def shared(self) -> list[Int32]:
        """Blocks [G] that get one more owner."""
        return [table[table >= 0] for table in self.tables]

    @property
    def num_restored(self) -> list[int]:
        """Blocks [G] to copy back from the swap pool."""
        return [int((table < 0).sum()) for table in self.tables]


@dataclass(slots=True, eq=False)
class Part:
    """Rows that were added together."""

    rows: Int32  # [R]
    num_new_tokens: Int32  # [R]
    new_blocks: Int32  # [G, R] appended to the tables
    tail_copies: npt.NDArray[np.bool_]  # [G, R] whether the last block is shared: copy on write


class Batch:
    """A step under construction, for the requests of one cell (suspects.py); None = all."""

    def __init__(self, state: State, cell: Cell | None = None) -> None:
        limits = state.limits
        self.state = state
        self.cell = cell
        self.tokens_left = limits.max_batch_tokens
        self.requests_left = limits.max_requests_per_batch
        self.pages_left = limits.cache_budget or sys.maxsize  # sys.maxsize = not counted
        # Logits, and places for samples, beyond one for each running row: newcomers and drafts need
        # them, and scores, unless the worker has logits for all tokens of a step.
        self.logits_left = sys.maxsize
        if max_logits := state.geometry.max_logits:
            num_rows = state.rows.num_rows
            assert max_logits >= num_rows, f"{max_logits} logits for {num_rows} rows"
            self.logits_left = max_logits - (num_rows - state.rows.num_free)
        self._scores_need_logits = 0 < max_logits < limits.max_batch_tokens
        owners = state.memory.counts.owners if limits.cache_budget else []
        self._is_read = [np.zeros(len(counts), np.bool_) for counts in owners]  # [G][block]
        self.prompt_time: PromptTime | None = None  # None = no limit
        self.free_rows = state.rows.next_free(state.rows.num_free)
        self.favoured: Request | None = None  # waiting, may join whatever the margin
        self.victims: list[Request] = []
        self.admissions: list[Admission] = []
        self.parts: list[Part] = []
        self.stalled: list[int] = []  # rows without memory for a token
        self.left_out: list[Request] = []  # running, beyond the cache budget
        # (group, shared tail block) → rows that get copies, in order
        self._copies: dict[tuple[int, int], list[Part]] = defaultdict(list)

    @property
    def is_empty(self) -> bool:
        return not self.parts

    @cached_property
    def active_before(self) -> list[Request]:
        """Active requests when the step began; looked up on first use, before any admission."""
        assert not self.admissions, "active requests looked up after an admission"
        return self.state.active()

    @property
    def active(self) -> list[Request]:
        """Those of `active_before` that this step has not preempted."""
        return [request for request in self.active_before if request not in self.victims]

    def has_margin(self) -> bool:
        """Whether enough blocks are free for a new prompt to join."""
        margin = self.state.limits.safety_margin
        needed = margin * FURTHER_SHARE if self.admissions else margin
        return self.state.memory.counts.free_share() >= needed

    def scheduled(self) -> set[int]:
        """The rows that compute in this step."""
        return {row for part in self.parts for row in part.rows.tolist()}

    def preempt(self, victims: list[Request]) -> None:
        """Preempts running requests; their rows and blocks are free for this step."""
        self.victims += victims
        self.free_rows += [request.row for request in victims]
        counts = self.state.memory.counts
        for group, block in self._copies:  # a block stays owned while a copy of it is planned
            counts.share(group, np.array([block], np.int32))
        self.state.preempt(victims)
        for (group, block), parts in list(self._copies.items()):
            if counts.owners[group][block] > 1:
                counts.give(group, np.array([block], np.int32))
                continue
            parts.pop().tail_copies[group, 0] = False  # its last owner has left: one row keeps it
            counts.cancel_take(group, 1)
            if not parts:
                del self._copies[group, block]
        if not self.state.rows.running:
            for request in victims:
                request.may_match = False  # its blocks were fragmented (shortage.py)

    def add_decoding(self, rows: Int32) -> None:
        """Schedules the next tokens of decoding rows [R]: at once if all fit, else row by row."""
        if not len(rows):
            return
        ones = np.ones(len(rows), np.int32)
        if self.state.rows.num_speculating:
            drafts = self._drafts_to_spare(rows)
            if drafts.any() and self._add_at_once(rows, ones + drafts):
                self.logits_left -= int(drafts.sum())
                return
        if not self._add_at_once(rows, ones):
            for row in rows.tolist():
                self.add_row(row, 1)

    def _add_at_once(self, rows: Int32, counts: Int32) -> bool:
        """All of these decoding rows with counts[R] tokens each; False, and nothing, if they do not
        fit or have tails to copy."""
        state, memory = self.state, self.state.memory
        computed = state.rows.computed[rows]
        needed = memory.blocks_needed(rows, computed + counts)
        has_siblings = state.rows.has_siblings[rows]
        num_read = self._num_read(rows, needed)
        if (
            len(rows) > self.requests_left
            or int(counts.sum()) > self.tokens_left
            or num_read > self.pages_left
            or (has_siblings.any() and memory.shared_tails(rows, computed).any())
            or not memory.device.take(needed.sum(axis=1).tolist())
        ):
            return False
        self._add(Part(rows, counts, needed, np.zeros(needed.shape, np.bool_)), num_read, rows)
        return True

    def _logits_to_spare(self) -> int:
        """Those left beside the ones that the first waiting request needs to join."""
        first = next(self.state.pending.in_order(), None)
        kept = 0 if first is None else 1 + len(first.siblings)
        return max(0, self.logits_left - (kept if kept <= len(self.free_rows) else 0))

    def _drafts_to_spare(self, rows: Int32) -> Int32:
        """Draft tokens of each decoding row that the step may verify [R]. Half of the tokens left
        are for prompts, and half of the logits, if these need any."""
        logits = self._logits_to_spare()
        if self._scores_need_logits:
            logits //= 2
        spare = min((self.tokens_left - len(rows)) // 2, logits)
        drafts = self.state.rows.num_drafts[rows]
        spared: Int32 = np.clip(spare - (drafts.cumsum(dtype=np.int32) - drafts), 0, drafts)
        return spared

    def add_row(self, row: int, wanted: int, reserved_tokens: int = 0) -> None:
        """Schedules up to `wanted` tokens of a running row, within budgets and memory.

        It gets fewer if memory for all is missing; with memory for none it is stalled. Its blocks
        suffice for these tokens, or for `reserved_tokens` in all if that is more.
        """
        memory, computed = self.state.memory, int(self.state.rows.computed[row])
        is_prompt = not self.state.rows.is_decoding[row]
        count = min(self._cut(wanted, computed) if is_prompt else wanted, self.tokens_left)
        request = self.state.rows.running[row]
        if request.num_unscored and self._scores_need_logits:
            count = _cut_scores(request, count, computed, self._logits_to_spare())
        if count == 0 or self.requests_left == 0:
            return
        rows = np.array([row], np.int32)
        tails = np.zeros((len(memory.groups), 1), np.bool_)
        if self.state.rows.has_siblings[row]:
            tails = memory.shared_tails(rows, np.array([computed], np.int32))
        while count:
            length = np.array([max(computed + count, reserved_tokens)], np.int32)
            needed = memory.blocks_needed(rows, length)
            num_read = self._num_read(rows, needed + tails)
            if not self.is_empty and num_read > self.pages_left:
                self.left_out.append(request)
                return
            if memory.device.take((needed + tails)[:, 0].tolist()):
                part = Part(rows, np.array([count], np.int32), needed, tails)
                self._add(part, num_read, rows)
                if is_prompt:
                    self._spend(request, count, computed)
                self._disown_tails(part, computed)
                return
            count //= 2
        self.stalled.append(row)

    def has_logits(self, request: Request) -> bool:
        """Whether a waiting request and its siblings could sample in this step."""
        return self.logits_left > len(request.siblings)

    def admit(self, candidate: Admission, wanted: int, reserved_tokens: int = 0) -> bool:
        """Tries to admit a waiting request with up to `wanted` tokens; False = it keeps waiting.

        It gets blocks for these tokens, or for `reserved_tokens` in all if that is more; in a batch
        that is not empty, for all of them or none.
        """
        assert not self.stalled, "admission beside stalled rows"
        request, memory, computed = candidate.request, self.state.memory, candidate.num_computed
        if self.requests_left == 0 or not self.has_logits(request):
            return False
        count = min(self._cut(wanted, computed), self.tokens_left)
        if request.num_unscored and self._scores_need_logits:
            spare = self.logits_left - 1 - len(request.siblings)
            count = _cut_scores(request, count, computed, spare)
        ends = [f + len(t) for f, t in zip(candidate.first_pages, candidate.tables, strict=True)]
        restored, shared = np.array(candidate.num_restored, np.int32)[:, None], candidate.shared
        while count:
            pages = -(-max(computed + count, reserved_tokens) // memory.page_size)
            needed = np.array([max(0, pages - end) for end in ends], np.int32)[:, None]
            num_read = self._num_read(candidate, needed + restored)
            if not self.is_empty and num_read > self.pages_left:
                return False
            if memory.device.take((needed + restored)[:, 0].tolist(), shared):
                break
            count = count // 2 if self.is_empty else 0
        else:
            return False
        self.assign(candidate)
        self.logits_left -= 1 + len(request.siblings)
        rows, counts = np.array([request.row], np.int32), np.array([count], np.int32)
        part = Part(rows, counts, needed, np.zeros(needed.shape, np.bool_))
        self._add(part, num_read, candidate)
        self._spend(request, count, computed)
        return True

    def assign(self, candidate: Admission) -> None:
        """Assigns rows to a waiting request, whose blocks have been taken, and to its siblings."""
        request, memory = candidate.request, self.state.memory
        num_rows = 1 + len(request.siblings)
        self.state.admit(request, self.free_rows[:num_rows], candidate.num_computed)
        del self.free_rows[:num_rows]
        for group, blocks in enumerate(candidate.tables):
            memory.tables.set(group, request.row, candidate.first_pages[group], blocks)
        if candidate.swapped is None:
            pages = candidate.num_computed // memory.page_size
            self.state.rows.published[request.row] = pages
            if self.state.limits.allow_block_sharing:
                memory.prefix_cache.promise(request, pages)
        self.admissions.append(candidate)

    def _add(self, part: Part, num_read: int, reader: Int32 | Admission) -> None:
        self.parts.append(part)
        self.tokens_left -= int(part.num_new_tokens.sum())
        self.requests_left -= len(part.rows)
        if self.pages_left != sys.maxsize:
            self.pages_left -= num_read
            for is_read, table in zip(self._is_read, self._tables(reader), strict=True):
                is_read[table] = True

    def _disown_tails(self, part: Part, computed: int) -> None:
        """Drops the row's ownership of the shared tails that it gets copies of, so that the last
        row to share one writes in place."""
        page = computed // self.state.memory.page_size
        for group in np.flatnonzero(part.tail_copies[:, 0]).tolist():
            tail = self.state.memory.tables.blocks[group, part.rows[0], page]
            self.state.memory.counts.give(group, tail[None])
            self._copies[group, int(tail)].append(part)

    def _cut(self, wanted: int, num_computed: int) -> int:
        return self.prompt_time.cut(wanted, num_computed) if self.prompt_time else wanted

    def _spend(self, request: Request, num_tokens: int, num_computed: int) -> None:
        if self.prompt_time:
            self.prompt_time.spend(num_tokens, num_computed)
        if request.num_unscored and self._scores_need_logits:
            self.logits_left -= _extra_logits(request, num_tokens, num_computed)

    def _num_read(self, reader: Int32 | Admission, new_blocks: Int32) -> int:
        """Pages that the step reads for a reader (running rows, or a waiting request) and for no
        earlier one, each once, however many rows share it. new_blocks: [G, R]"""
        if self.pages_left == sys.maxsize:
            return 0
        pairs = zip(self._is_read, self._tables(reader), strict=True)
        unread = [table[~is_read[table]] for is_read, table in pairs]
        if new_blocks.shape[1] > 1:
            unread = [np.unique(table) for table in unread]
        return int(new_blocks.sum()) + sum(map(len, unread))

    def _tables(self, reader: Int32 | Admission) -> list[Int32]:
        """The reader's blocks of each group, row after row. [G][blocks]"""
        if isinstance(reader, Admission):
            return reader.shared
        tables = self.state.memory.tables
        if len(reader) == 1:
            return tables.of_row(int(reader[0]))
        start, blocks = tables.flat(reader)
        return [blocks[first:end] for first, end in zip(start[:, 0], start[:, -1], strict=True)]


def _extra_logits(request: Request, count: int, num_computed: int) -> int:
    """Logits that `count` tokens of a prompt behind its `num_computed` need beyond the row's own
    ones, to score the prompt and perhaps to sample."""
    begin, end = max(num_computed, len(request.prompt_scores)), num_computed + count
    num_scores = max(0, min(end, request.num_prompt_tokens - 1) - begin)
    samples = end == len(request.token_ids) < request.max_total_tokens
    return max(0, num_scores + samples - 1)


def _cut_scores(request: Request, count: int, num_computed: int, spare: int) -> int:
    """The first of `count` tokens of a prompt behind its `num_computed` for which `spare` logits
    suffice beside the row's own ones."""
    excess = _extra_logits(request, count, num_computed) - spare
    if excess <= 0:
        return count
    if excess == 1 and num_computed + count == len(request.token_ids) < request.max_total_tokens:
        return count - 1  # all but the sample
    return max(num_computed, len(request.prompt_scores)) - num_computed + spare + 1
