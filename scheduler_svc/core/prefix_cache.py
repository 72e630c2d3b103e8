"""Shares KV between requests that begin alike: names for blocks, and the search for them.

A full block is named by the hash of (name of the block before it, its tokens), the first one by
the request's cache_salt; so a name stands for all tokens up to the block's end, and requests
share only with the same salt. Tokens are not compared on a hit, hence a wide hash (BLAKE2b, 128
bits). A block gets its name when the result of the step that filled it has come back.

A hit needs the blocks of every full-attention group from the start, and of every sliding group
those that the next query's window reads; at least one prompt token is always computed.

A block that a running request is about to fill is *promised*: a request that needs it next waits,
so that a burst computes a shared prefix once. The promise ends when the block is published, or
when the request that made it loses its blocks, in whatever way.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Container
from dataclasses import dataclass
from typing import Final

import numpy as np

from protos.plan import Int32
from scheduler_svc.core.allocators import FullAttentionAllocator, Name
from scheduler_svc.core.request import Request

DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Hit:
    """Blocks that a request can share: for each group its table from first_pages on."""

    num_tokens: int  # a multiple of page_size
    first_pages: tuple[int, ...]  # [G]
    blocks: tuple[Int32, ...]  # [G]


def block_names(request: Request, page_size: int, count: int) -> list[Name]:
    """Names of the request's first `count` full blocks; kept with the request, for they stay."""
    names = request.names
    while len(names) < count:
        parent = names[-1] if names else _root(request.cache_salt)
        start = len(names) * page_size
        tokens = array.array("i", request.token_ids[start : start + page_size]).tobytes()
        names.append(hashlib.blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest())
    return names


def _root(cache_salt: str) -> Name:
    """What stands in the place of a parent for a first block: no block can have that name."""
    salt = cache_salt.encode()
    return hashlib.blake2b(salt, digest_size=DIGEST_BYTES, person=b"cache_salt").digest()


class PrefixCache:
    """The search, the promises, and the counts of both."""

    def __init__(self, allocators: list[FullAttentionAllocator], page_size: int) -> None:
        self._allocators = allocators
        self._page_size = page_size
        self._promised: dict[Name, Request] = {}
        self.num_queried = 0  # prompt tokens looked up at first admissions
        self.num_hit = 0  # of them found

    @property
    def num_promised(self) -> int:
        return len(self._promised)

    def match(self, request: Request) -> Hit:
        """The longest run of blocks that the request can share now."""
        usable = (len(request.token_ids) - 1) // self._page_size
        full = [a for a in self._allocators if not a.sliding_window]
        pages = 0
        names = request.names  # made as far as they are found, no further
        while pages < usable:
            name = block_names(request, self._page_size, pages + 1)[pages]
            if not all(name in a.block_of for a in full):
                break
            pages += 1
        sliding = [a for a in self._allocators if a.sliding_window]
        while pages and not all(
            names[page] in a.block_of
            for a in sliding
            for page in range(a.first_page(pages * self._page_size), pages)
        ):
            pages -= 1
        first_pages = tuple(a.first_page(pages * self._page_size) for a in self._allocators)
        return Hit(
            num_tokens=pages * self._page_size,
            first_pages=first_pages,
            blocks=tuple(
                np.array([a.block_of[name] for name in names[first:pages]], np.int32)
                for a, first in zip(self._allocators, first_pages, strict=True)
            ),
        )

    def is_promised(self, request: Request, hit: Hit, also: Container[Name] = ()) -> bool:
        """Whether somebody is filling the block that the request would have to compute next;
        `also` are promises about to be made."""
        page = hit.num_tokens // self._page_size
        if page >= (len(request.token_ids) - 1) // self._page_size:
            return False
        name = block_names(request, self._page_size, page + 1)[page]
        if name in self._promised:
            request.awaited = name  # so that it is not looked for again until that is kept
            return True
        return name in also

    def is_awaited(self, name: Name) -> bool:
        """Whether the block with this name is still promised, and not there yet."""
        return name in self._promised

    def to_promise(self, request: Request, first_page: int) -> list[Name]:
        """Names of the blocks that the request fills when it is admitted with first_page blocks:
        those of all its known tokens."""
        full = len(request.token_ids) // self._page_size
        return block_names(request, self._page_size, full)[first_page:full]

    def promise(self, request: Request, first_page: int) -> None:
        for name in self.to_promise(request, first_page):
            self._promised.setdefault(name, request)

    def publish(
        self, request: Request, page: int, blocks: list[int], first_pages: list[int]
    ) -> None:
        """Names the blocks [G] that hold the request's page, those that have not left a window:
        a group's table begins at first_pages [G]. The promise is kept."""
        name = block_names(request, self._page_size, page + 1)[page]
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
