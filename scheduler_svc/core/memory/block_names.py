"""Names for full blocks: the hash of (name of the previous block, the block's tokens).

The first block's parent is the request's cache_salt, so a name stands for all tokens up to the
block's end, and only requests with the same salt share. Tokens are not compared on a hit, hence a
wide hash (BLAKE2b, 128 bits). As hashing a long prompt takes as long as a step, the names of a
prefix in common with a recent prompt, found by comparing tokens, are copied.
"""

from __future__ import annotations

import array
import bisect
import hashlib
from collections import deque
from typing import Final

from protos.plan import Int32
from scheduler_svc.core.request import Request

Name = bytes  # DIGEST_BYTES of them

DIGEST_BYTES: Final = 16
NUM_REMEMBERED: Final = 16  # prompts to copy names from


class BlockNames:
    """Computes block names; `Request.names` keeps them."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        # prompts and their names so far; no two share a long prefix
        self._remembered: deque[tuple[Int32, list[Name]]] = deque(maxlen=NUM_REMEMBERED)

    def of(self, request: Request, count: int) -> list[Name]:
        """Names of at least the first `count` full blocks; the caller must not change them."""
        names = request.names
        if len(names) < count:
            if not names:
                self._hash(request, 1)
                self._copy(request)
            self._hash(request, count)
        return names

    def _hash(self, request: Request, count: int) -> None:
        """Appends the missing names of the first `count` blocks."""
        names, size = request.names, self._page_size
        parent = names[-1] if names else _root(request.cache_salt)
        for start in range(len(names) * size, count * size, size):
            tokens = array.array("i", request.token_ids[start : start + size]).tobytes()
            parent = hashlib.blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()
            names.append(parent)

    def _copy(self, request: Request) -> None:
        """Appends the names of the longest prefix in common with another prompt."""
        names, prompt = request.names, request.first_tokens
        common: list[Name] = []
        for other, others_names in self._remembered:
            if others_names[0] == names[0]:
                count = _num_equal(prompt, other) // self._page_size
                if min(count, len(others_names)) > len(common):
                    common = others_names[:count]
        names += common[1:]
        if 2 * len(names) * self._page_size < len(prompt):
            self._remembered.append((prompt, names))


def num_common(names: list[Name], other: list[Name]) -> int:
    """Number of leading pages in common, by bisection: equal names mean equal prefixes."""
    lengths = range(1, min(len(names), len(other)) + 1)
    return bisect.bisect_left(lengths, True, key=lambda n: names[n - 1] != other[n - 1])


def _num_equal(prompt: Int32, other: Int32) -> int:
    """Number of leading tokens in common."""
    length = min(len(prompt), len(other))
    differs = prompt[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def _root(cache_salt: str) -> Name:
    """The parent of a first block; no block has this name."""
    salt = cache_salt.encode()
    return hashlib.blake2b(salt, digest_size=DIGEST_BYTES, person=b"cache_salt").digest()
