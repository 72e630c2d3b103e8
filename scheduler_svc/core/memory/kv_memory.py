"""The KV memory of a worker as the scheduler accounts for it: the one door to memory/.

It knows which blocks hold a row's pages and what the next plan moves before its forward. Blocks are
shared by reference count; capacity is a return value, and one count answers for it (counts.py).
Published besides the methods: `device` and `swap` (BlockPool), `counts`, `tables`, `prefix_cache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from protos.plan import NUM_RESERVED_CHUNKS, Int32
from scheduler_svc.core.limits import Geometry
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.block_tables import BlockTables
from scheduler_svc.core.memory.prefix_cache import PrefixCache
from scheduler_svc.core.request import Request, Swapped


@dataclass(slots=True)
class Transfers:
    """What the next plan moves before its forward: (group, from, to) triples."""

    swap_out: list[tuple[int, int, int]] = field(default_factory=list)  # block → swap block
    swap_in: list[tuple[int, int, int]] = field(default_factory=list)  # swap block → block
    copy: list[tuple[int, int, int]] = field(default_factory=list)  # block → block
    # tables [G] that the worker may read for swap_out until the plan's result
    quarantined: list[tuple[Request, list[Int32]]] = field(default_factory=list)


class KvMemory:
    """The memory of one worker, for N rows of up to `max_tokens` tokens and G cache groups."""

    def __init__(self, geometry: Geometry, num_rows: int, max_tokens: int) -> None:
        self.geometry = geometry
        self.page_size = geometry.page_size
        self.device = BlockPool(geometry, geometry.num_chunks, NUM_RESERVED_CHUNKS)
        self.swap = BlockPool(geometry, geometry.num_swap_chunks, 0)
        self.groups = self.device.allocators
        self.counts = self.device.counts
        self.tables = BlockTables(len(self.groups), num_rows, -(-max_tokens // self.page_size))
        self.prefix_cache = PrefixCache(self.groups, self.page_size)
        self.transfers = Transfers()

    def blocks_needed(self, rows: Int32, lengths: Int32) -> Int32:
        """Blocks to append to the tables of rows [R] for lengths[i] tokens in all. [G, R]"""
        pages = (lengths + np.int32(self.page_size - 1)) // np.int32(self.page_size)
        needed: Int32 = np.maximum(pages - self.tables.end[:, rows], 0)
        return needed

    def shared_tails(self, rows: Int32, computed: Int32) -> npt.NDArray[np.bool_]:
        """Whether the token behind computed[i] falls into a block that others own too. [G, R]"""
        blocks = self.tables.blocks
        page = np.minimum(computed // self.page_size, blocks.shape[2] - 1)
        is_partial = computed % self.page_size != 0
        owners = zip(self.counts.owners, blocks, strict=True)
        return np.stack([is_partial & (count[table[rows, page]] > 1) for count, table in owners])

    def window(self, row: int, computed: int) -> list[Int32]:
        """The row's blocks that queries from position `computed` on read, as views. [G]"""
        tables = zip(self.groups, self.tables.first[:, row], self.tables.of_row(row), strict=True)
        return [table[max(0, a.first_page(computed) - int(first)) :] for a, first, table in tables]

    def holds_window(self, row: int, computed: int) -> bool:
        """Whether the row still has all blocks that queries from position `computed` on read."""
        firsts = self.tables.first[:, row].tolist()
        pairs = zip(self.groups, firsts, strict=True)
        return all(first <= a.first_page(computed) for a, first in pairs)

    def release_row(self, row: int) -> None:
        """Empties the row's tables and releases their blocks."""
        self.device.give_tables(self.tables.clear(row))

    def release_head(self, group: int, row: int, first: int) -> None:
        """Releases the row's pages before `first`, which no later query reads."""
        begin = int(self.tables.first[group, row])
        self.device.give(group, self.tables.blocks[group, row, begin:first][::-1])
        self.tables.first[group, row] = first

    def release_tail(self, row: int, num_tokens: int) -> None:
        """Releases the row's pages behind those of its first `num_tokens` tokens."""
        end = -(-num_tokens // self.page_size)
        for group in range(len(self.groups)):
            if end < self.tables.end[group, row]:
                table = self.tables.blocks[group, row, end : self.tables.end[group, row]]
                self.device.give(group, table[::-1])
                self.tables.end[group, row] = end

    def copy_tail(self, group: int, row: int, page: int) -> None:
        """Replaces a shared block by one of the row's own, and has the next plan copy the content.
        The row's ownership of the shared block has been dropped already."""
        shared = int(self.tables.blocks[group, row, page])
        (own,) = self.device.draw(group, 1).tolist()
        self.transfers.copy.append((group, shared, own))
        self.tables.blocks[group, row, page] = own

    def fork(self, row: int, sibling: int, computed: int) -> None:
        """Shares with the sibling's row the blocks that its queries will read."""
        for group, blocks in enumerate(self.window(row, computed)):
            self.counts.share(group, blocks)
            self.tables.set(group, sibling, int(self.tables.end[group, row]) - len(blocks), blocks)

    def swap_out(self, request: Request, computed: int) -> Swapped | None:
        """Empties a running request's tables, and has the next plan copy what later queries read
        into the swap pool; None, and nothing changes, if that has no room or there is nothing.

        Where the worker copies beside the forward, blocks stay owned until the plan's result.
        """
        row = request.row
        kept = self.window(row, computed)
        needs = [len(blocks) for blocks in kept]
        if not any(needs) or not self.swap.take(needs):
            return None
        self.swap.begin_drawing(needs)
        drawn = tuple(self.swap.draw(group, count) for group, count in enumerate(needs))
        self.swap.end_drawing()
        firsts = tuple(int(end) - n for end, n in zip(self.tables.end[:, row], needs, strict=True))
        for group, (blocks, swap_blocks) in enumerate(zip(kept, drawn, strict=True)):
            pairs = zip(blocks.tolist(), swap_blocks.tolist(), strict=True)
            self.transfers.swap_out += [(group, block, swap) for block, swap in pairs]
            self.release_head(group, row, firsts[group])
        if self.geometry.overlaps_swap:
            self.transfers.quarantined.append((request, self.tables.clear(row)))
        else:
            self.release_row(row)
        return Swapped(computed, firsts, drawn)

    def swap_in(self, row: int, swapped: Swapped) -> None:
        """Draws a block for each -1 in the row's tables, and has the next plan restore its content
        from the swap pool."""
        for group, swap_blocks in enumerate(swapped.blocks):
            table = self.tables.of(group, row)
            gaps = np.flatnonzero(table < 0)
            table[gaps] = self.device.draw(group, len(gaps))
            pairs = zip(swap_blocks[gaps].tolist(), table[gaps].tolist(), strict=True)
            self.transfers.swap_in += [(group, source, block) for source, block in pairs]

    def cancel_swap_out(self, request: Request, swapped: Swapped) -> None:
        """Cancels the copies that no plan has carried yet."""
        places = {(group, b) for group, table in enumerate(swapped.blocks) for b in table.tolist()}
        transfers = self.transfers
        transfers.swap_out = [t for t in transfers.swap_out if (t[0], t[2]) not in places]
        for holder, tables in transfers.quarantined:
            if holder is request:
                self.device.give_tables(tables)
        transfers.quarantined = [held for held in transfers.quarantined if held[0] is not request]

    def free_swap(self, tables: Sequence[Int32]) -> None:
        """Releases tables [G] of swap blocks."""
        for group, blocks in enumerate(tables):
            self.swap.give(group, blocks)

    def take_transfers(self) -> Transfers:
        """The transfers for the plan being completed; none are left."""
        transfers, self.transfers = self.transfers, Transfers()
        return transfers

    def flush(self) -> int:
        """Forgets all block names, returns their number. Owners keep their blocks, shared ones
        included."""
        num_named = sum(len(allocator.name_of) for allocator in self.groups)
        for allocator in self.groups:
            allocator.flush()
        self.device.chunks.flush()
        return num_named
