"""Guesses the next tokens of a text from its own past: prompt lookup, as in transformers'
PromptLookupCandidateGenerator.

The last tokens have often stood in the text before: in a quoted passage, a list, code that is
edited. The guess is what followed there. Of the earlier places that end with the same
SHORTEST_MATCH tokens, the one where most tokens agree wins; the latest one among equals.

Places are found by a hash table with chains, as in LZ77: `_heads` has the latest place of each hash
value, `_earlier` links each place to the one before it with the same value. So a token costs
bounded time, however long the text is, and at most 16 bytes. Pure: equal texts give equal guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from protos.plan import Int32

SHORTEST_MATCH: Final = 3  # tokens
LONGEST_MATCH: Final = 32  # tokens compared; places that agree in so many are equals
MOST_PLACES: Final = 16  # looked at for one guess, latest first

_FACTORS: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)  # one for each token of a shortest match
_LEAST_BITS: Final = 8


class PromptLookup:
    """The places of all short passages of one text, which only grows."""

    def __init__(self) -> None:
        # A place is the number of tokens up to the passage's end; 0 = none.
        self._heads: Int32 = np.zeros(0, np.int32)  # [2 ** bits] by hash value
        self._earlier: Int32 = np.zeros(0, np.int32)  # [2 ** bits] by place
        self._bits = 0
        self._end = 0  # places up to it are in the table

    def guess(
        self, token_ids: Sequence[int], most: int, least_match: int = SHORTEST_MATCH
    ) -> list[int]:
        """Up to `most` tokens that may follow, and no more than agree before them; none if fewer
        than `least_match` agree. `token_ids` begins with those of the last call."""
        place, length = self.find(token_ids)
        if length < least_match:
            return []
        most = min(most, length)
        guess = list(token_ids[place : place + most])
        while len(guess) < most:  # the text repeats itself
            guess.append(guess[place - len(token_ids)])
        return guess

    def find(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """The place that fits the end of the text best, and the number of tokens that agree; (0, 0)
        if there is none."""
        end = len(token_ids)
        if end <= SHORTEST_MATCH:
            return 0, 0
        self._extend(token_ids)
        best, longest = 0, SHORTEST_MATCH - 1
        place = int(self._earlier[end])
        for _ in range(MOST_PLACES):
            if not place or longest == LONGEST_MATCH:
                break
            # most places fail here, the first token that would make them better
            if place > longest and token_ids[place - longest - 1] == token_ids[end - longest - 1]:
                length, limit = 0, min(place, LONGEST_MATCH)
                while (
                    length < limit and token_ids[place - length - 1] == token_ids[end - length - 1]
                ):
                    length += 1
                if length > longest:
                    best, longest = place, length
            place = int(self._earlier[place])
        return (best, longest) if best else (0, 0)

    def _extend(self, token_ids: Sequence[int]) -> None:
        """Adds the places up to the end of the text."""
        end = len(token_ids)
        if end >= len(self._earlier):  # all of them again, in a table of twice the size
            self._bits = max(_LEAST_BITS, end.bit_length())
            size = 1 << self._bits
            self._heads, self._earlier = np.zeros(size, np.int32), np.zeros(size, np.int32)
            self._end = 0
        first = max(self._end + 1, SHORTEST_MATCH)
        if end - first < 8:
            for place in range(first, end + 1):
                value = self._value(token_ids[place - SHORTEST_MATCH : place])
                self._earlier[place] = self._heads[value]
                self._heads[value] = place
        else:
            self._extend_by_many(token_ids, first)
        self._end = end

    def _extend_by_many(self, token_ids: Sequence[int], first: int) -> None:
        """The same in a few array operations."""
        tokens = np.array(token_ids[first - SHORTEST_MATCH :], np.uint64)
        windows = np.lib.stride_tricks.sliding_window_view(tokens, SHORTEST_MATCH)
        mixed = (windows * np.array(_FACTORS, np.uint64)).sum(axis=1, dtype=np.uint64)
        values = ((mixed & np.uint64(0xFFFFFFFF)) >> np.uint64(32 - self._bits)).astype(np.int32)
        places = np.arange(first, len(token_ids) + 1, dtype=np.int32)
        order = np.argsort(values, kind="stable")
        values, places = values[order], places[order]
        is_first = np.ones(len(values), np.bool_)
        is_first[1:] = values[1:] != values[:-1]
        self._earlier[places[1:]] = places[:-1]
        self._earlier[places[is_first]] = self._heads[values[is_first]]
        is_last = np.roll(is_first, -1)
        self._heads[values[is_last]] = places[is_last]

    def _value(self, passage: Sequence[int]) -> int:
        mixed = sum(token * factor for token, factor in zip(passage, _FACTORS, strict=True))
        return (mixed & 0xFFFFFFFF) >> (32 - self._bits)
