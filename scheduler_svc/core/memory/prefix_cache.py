"""Shares KV between requests that begin alike: the search, and the promises.

A full block has a name (block_names.py), and gets it when the result of the step that filled it
has come back. A hit needs the blocks of every full-attention group from the start, and of every
sliding group those that the next query's window reads; at least one prompt token is always
computed. What was found is kept with the request and stays good for as long as its blocks keep
their content, so that a request that waits is not searched for anew in every step.

A block that a running request is about to fill is *promised*: a request that needs it next waits,
so that a burst computes a shared prefix once. The promise ends when the block is published, or
when the request that made it loses its blocks, in whatever way. Who waits, waits for the last
block that both have in common: each step then asks one name of it, however long the prefix.
"""

from __future__ import annotations

import numpy as np

from protos.plan import Int32
from scheduler_svc.core.memory.allocators import FullAttentionAllocator
from scheduler_svc.core.memory.block_names import BlockNames, Name, num_common
from scheduler_svc.core.request import Hit, Request, Swapped


class PrefixCache:
    """The search, the promises, and the counts of both."""

    def __init__(self, allocators: list[FullAttentionAllocator], page_size: int) -> None:
        self._allocators = allocators
        self._full = [a for a in allocators if not a.sliding_window]
        self._sliding = [a for a in allocators if a.sliding_window]
        self._page_size = page_size
        self._names = BlockNames(page_size)
        self._promised: dict[Name, Request] = {}
        self.num_queried = 0  # prompt tokens looked up at first admissions
        self.num_hit = 0  # of them found

    @property
    def num_promised(self) -> int:
        return len(self._promised)

    def name_prompt(self, request: Request) -> None:
        """Names what can be named of a new request, so that no step has to wait for that."""
        self._names.of(request, request.num_prompt_tokens // self._page_size)

    def match(self, request: Request) -> Hit | None:
        """The longest run of blocks that the request can share now; None while somebody fills
        the one that it would have to compute next."""
        if self.awaits(request):
            return None
        request.awaited = None
        usable = (len(request.token_ids) - 1) // self._page_size
        hit = request.hit
        if hit is not None and self._is_current(request, hit, usable):
            is_promised = self._is_promised(request, hit.num_pages, usable)
            return None if is_promised else hit
        kept = 0 if hit is None else self._num_kept(hit)
        run = self._run(request, kept, usable)
        pages = self._with_windows(request, run)
        if self._is_promised(request, pages, usable):
            return None
        first_pages = tuple(a.first_page(pages * self._page_size) for a in self._allocators)
        tables = []
        for group, (allocator, first) in enumerate(zip(self._allocators, first_pages, strict=True)):
            known = np.zeros(0, np.int32)
            if hit is not None and not allocator.sliding_window:
                known = hit.blocks[group][: min(kept, pages)]
            names = request.names[first + len(known) : pages]
            more = np.fromiter(map(allocator.block_of.__getitem__, names), np.int32, len(names))
            tables.append(np.concatenate([known, more]))
        request.hit = Hit(pages, run, first_pages, tuple(tables), self._stamps(tables))
        return request.hit

    def awaits(self, request: Request) -> bool:
        """Whether the block that it waited for at the last look is still to come."""
        return request.awaited in self._promised

    def find(self, request: Request, swapped: Swapped) -> tuple[Int32, ...]:
        """Which of an offloaded request's blocks are still there, for each group; -1 where one
        is not. Only those found at the first look can be found again."""
        found = swapped.found
        if found is None:
            full = swapped.num_tokens // self._page_size  # a page filled in part is its own
            tables = []
            for allocator, first, blocks in zip(
                self._allocators, swapped.first_pages, swapped.blocks, strict=True
            ):
                names = request.names[first:full]
                there = [allocator.block_of.get(name, -1) for name in names]
                tables.append(np.array(there + [-1] * (len(blocks) - len(there)), np.int32))
            found = Hit(full, full, swapped.first_pages, tuple(tables), self._stamps(tables))
            swapped.found = found
        stamps = zip(found.blocks, self._stamps(found.blocks), found.stamps, strict=True)
        return tuple(np.where(now == then, blocks, np.int32(-1)) for blocks, now, then in stamps)

    def promise(self, request: Request, first_page: int) -> None:
        """The request, admitted with first_page blocks, fills those of its other known tokens."""
        full = len(request.token_ids) // self._page_size
        for name in self._names.of(request, full)[first_page:full]:
            self._promised.setdefault(name, request)

    def publish(
        self, request: Request, page: int, blocks: list[int], first_pages: list[int]
    ) -> None:
        """Names the blocks [G] that hold the request's page, those that have not left a window:
        a group's table begins at first_pages [G]. The promise is kept."""
        name = self._names.of(request, page + 1)[page]
        for allocator, block, first in zip(self._allocators, blocks, first_pages, strict=True):
            if page >= first:
                allocator.publish(block, name)
        if self._promised.get(name) is request:
            del self._promised[name]

    def break_promises(self, request: Request) -> None:
        for name in request.names:
            if self._promised.get(name) is request:
                del self._promised[name]

    def count(self, request: Request, hit_tokens: int) -> None:
        """Notes a first admission; a request's own resets do not raise the hit rate."""
        self.num_queried += request.num_prompt_tokens
        self.num_hit += hit_tokens

    def _is_found(self, request: Request, page: int) -> bool:
        """Whether every full-attention group has the page."""
        name = self._names.of(request, page + 1)[page]
        return all(name in allocator.block_of for allocator in self._full)

    def _run(self, request: Request, begin: int, usable: int) -> int:
        """How many pages the full-attention groups have from the start; they have `begin`."""
        run = begin
        while run < usable:
            names = self._names.of(request, run + 1)  # made as far as they are found, no further
            end = stop = min(len(names), usable)
            for allocator in self._full:
                block_of = allocator.block_of
                stop = next(
                    (page for page in range(run, stop) if names[page] not in block_of), stop
                )
            run = stop
            if stop < end:
                break
        return run

    def _with_windows(self, request: Request, run: int) -> int:
        """The most of these pages whose windows are there too."""
        names, pages, is_missing = request.names, run, True
        while pages and is_missing:
            is_missing = False
            for allocator in self._sliding:
                first = allocator.first_page(pages * self._page_size)
                for page in range(pages - 1, first - 1, -1):
                    if names[page] not in allocator.block_of:
                        pages, is_missing = page, True  # windows of all longer hits have it too
                        break
        return pages

    def _is_promised(self, request: Request, page: int, usable: int) -> bool:
        if page >= usable:
            return False
        name = self._names.of(request, page + 1)[page]
        filler = self._promised.get(name)
        if filler is None:
            return False
        last = request.names[min(num_common(request.names, filler.names), usable) - 1]
        request.awaited = last if self._promised.get(last) is filler else name
        return True

    def _is_current(self, request: Request, hit: Hit, usable: int) -> bool:
        """Whether a hit found earlier is all there, and no longer run has been published. A longer
        one for sliding groups alone may go unseen."""
        if hit.num_run < usable and (not self._full or self._is_found(request, hit.num_run)):
            return False
        stamps = zip(self._stamps(hit.blocks), hit.stamps, strict=True)
        return all(np.array_equal(now, then) for now, then in stamps)

    def _num_kept(self, hit: Hit) -> int:
        """Leading pages of an earlier hit that every full-attention group still has."""
        kept = hit.num_pages if self._full else 0
        for allocator, blocks, stamps in zip(self._allocators, hit.blocks, hit.stamps, strict=True):
            if not allocator.sliding_window:
                differs = allocator.stamps[blocks[:kept]] != stamps[:kept]
                kept = int(differs.argmax()) if differs.any() else kept
        return kept

    def _stamps(self, tables: list[Int32] | tuple[Int32, ...]) -> tuple[np.ndarray, ...]:
        return tuple(a.stamps[table] for a, table in zip(self._allocators, tables, strict=True))
