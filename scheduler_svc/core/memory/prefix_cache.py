"""The prefix cache: finds the KV that a request can share, and promises KV being computed.

A full block gets its name (block_names.py) with the result of the step that filled it. A hit needs
every full-attention group's blocks from the start, and every sliding group's in the window of the
next query; at least one prompt token is always computed, and all whose logits are still to score
the next one. A hit is kept with its request and stays
valid while its blocks keep their content, so that waiting requests are not searched in every step.

A block that a running request is about to fill is *promised*: a request that needs it next waits,
so that a burst computes a shared prefix once. Publishing the block, or losing the filler's blocks
in whatever way, ends the promise. A request waits for the last block that both have in common, so a
step checks one name, however long the prefix.
"""

from __future__ import annotations

import numpy as np

from protos.plan import Int32
from scheduler_svc.core.memory.allocators import FullAttentionAllocator
from scheduler_svc.core.memory.block_names import BlockNames, Name, num_common
from scheduler_svc.core.memory.cache_events import CacheEvents, StoredBlock
from scheduler_svc.core.request import Hit, Request, Swapped


class PrefixCache:
    """Hits, promises and the hit rate, over the allocators of G cache groups."""

    def __init__(self, allocators: list[FullAttentionAllocator], page_size: int) -> None:
        self._allocators = allocators
        self._full = [a for a in allocators if not a.sliding_window]
        self._sliding = [a for a in allocators if a.sliding_window]
        self._page_size = page_size
        self._names = BlockNames(page_size)
        self._promised: dict[Name, Request] = {}
        self.num_queried = 0  # prompt tokens of first admissions
        self.num_hit = 0  # those of them that were cached

    @property
    def num_promised(self) -> int:
        return len(self._promised)

    def name_first_tokens(self, request: Request) -> None:
        """Names the full blocks of a new request, so that no step has to."""
        self._names.of(request, len(request.token_ids) // self._page_size)

    def match(self, request: Request) -> Hit | None:
        """The longest prefix that the request can share now; None while another request fills the
        block that it would compute next."""
        if self.awaits(request):
            return None
        request.awaited = None
        usable = len(request.token_ids) - 1
        if request.num_unscored:  # a hit gives no logits
            usable = len(request.prompt_scores)
        usable //= self._page_size
        hit = request.hit
        if hit is not None and self._is_current(request, hit, usable):
            return None if self._is_promised(request, hit.num_pages, usable) else hit
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
        """Whether the block that it waited for at the last look-up is still promised."""
        return request.awaited in self._promised

    def find(self, request: Request, swapped: Swapped) -> tuple[Int32, ...]:
        """An offloaded request's blocks [G] that are still cached, -1 for the others. Only those
        found by the first look-up can be found again."""
        found = swapped.found
        if found is None:
            full = swapped.num_tokens // self._page_size  # a partial page has no name
            tables = []
            for allocator, first, blocks in zip(
                self._allocators, swapped.first_pages, swapped.blocks, strict=True
            ):
                names = request.names[first:full]
                cached = [allocator.block_of.get(name, -1) for name in names]
                tables.append(np.array(cached + [-1] * (len(blocks) - len(cached)), np.int32))
            found = Hit(full, full, swapped.first_pages, tuple(tables), self._stamps(tables))
            swapped.found = found
        stamps = zip(found.blocks, self._stamps(found.blocks), found.stamps, strict=True)
        return tuple(np.where(now == then, blocks, np.int32(-1)) for blocks, now, then in stamps)

    def promise(self, request: Request, first_page: int) -> None:
        """Promises the full blocks that an admitted request will compute, from first_page on."""
        full = len(request.token_ids) // self._page_size
        for name in self._names.of(request, full)[first_page:full]:
            self._promised.setdefault(name, request)

    def publish(
        self, request: Request, page: int, blocks: list[int], first_pages: list[int]
    ) -> None:
        """Names the blocks [G] of the request's page, and ends its promise. A group whose table
        starts behind the page (first_pages [G]) has released its block already."""
        name = self._names.of(request, page + 1)[page]
        for allocator, block, first in zip(self._allocators, blocks, first_pages, strict=True):
            if page >= first and allocator.publish(block, name) and allocator.events is not None:
                parent = request.names[page - 1] if page else None
                begin = page * self._page_size
                tokens = tuple(request.token_ids[begin : begin + self._page_size])
                allocator.events.store(StoredBlock(name, parent, tokens))
        if self._promised.get(name) is request:
            del self._promised[name]

    def report_to(self, events: CacheEvents) -> None:
        """From now on `events` records the blocks of the first full-attention group, or of the
        first group if there is none."""
        events.clear()
        if self._allocators:
            (self._full or self._allocators)[0].events = events

    def break_promises(self, request: Request) -> None:
        """Ends all promises of a request that loses its blocks."""
        for name in request.names:
            if self._promised.get(name) is request:
                del self._promised[name]

    def count(self, request: Request, hit_tokens: int) -> None:
        """Counts a first admission; counting a request's later ones would inflate the hit rate."""
        self.num_queried += request.num_prompt_tokens
        self.num_hit += hit_tokens

    def _run(self, request: Request, begin: int, usable: int) -> int:
        """Leading pages that all full-attention groups have, known to be at least `begin`."""
        run = begin
        while run < usable:
            names = self._names.of(request, run + 1)  # named only as far as found
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
        """The most of `run` pages for which the sliding groups have the next query's window."""
        names, pages, is_missing = request.names, run, True
        while pages and is_missing:
            is_missing = False
            for allocator in self._sliding:
                first = allocator.first_page(pages * self._page_size)
                for page in range(pages - 1, first - 1, -1):
                    if names[page] not in allocator.block_of:
                        pages, is_missing = page, True  # longer hits need it too
                        break
        return pages

    def _is_promised(self, request: Request, page: int, usable: int) -> bool:
        """Whether another request fills the page; then sets what the request waits for."""
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
        """Whether an earlier hit is intact and no full-attention page behind it has been published.
        A longer hit through sliding groups alone may be missed."""
        if hit.num_run < usable:
            name = self._names.of(request, hit.num_run + 1)[hit.num_run]
            if all(name in allocator.block_of for allocator in self._full):
                return False
        stamps = zip(self._stamps(hit.blocks), hit.stamps, strict=True)
        return all(np.array_equal(now, then) for now, then in stamps)

    def _num_kept(self, hit: Hit) -> int:
        """Leading pages of an earlier hit that all full-attention groups still have."""
        kept = hit.num_pages if self._full else 0
        for allocator, blocks, stamps in zip(self._allocators, hit.blocks, hit.stamps, strict=True):
            if not allocator.sliding_window:
                differs = allocator.stamps[blocks[:kept]] != stamps[:kept]
                kept = int(differs.argmax()) if differs.any() else kept
        return kept

    def _stamps(self, tables: list[Int32] | tuple[Int32, ...]) -> tuple[np.ndarray, ...]:
        return tuple(a.stamps[table] for a, table in zip(self._allocators, tables, strict=True))
