"""Chooses the shape that a step is padded to. Pure arithmetic.

A CUDA graph replays one shape, so steps are padded to few shapes: decode steps (every request one
token) to sizes that lie close together, mixed steps to powers of two. Lengths of sequences need no
padding: they are read on the device.

Owns: the sizes. Does not own: what padding contains (inputs.py), what is captured (graphs.py).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

MOST_DECODE_SIZES: Final = 40
_DENSE_UNTIL: Final = 64  # up to here decode sizes are q_padding_interval_size apart
_SMALLEST_MIXED: Final = 64  # tokens
_FEWEST_LOGITS: Final = 16


@dataclass(frozen=True, slots=True)
class PaddedShape:
    """Lengths after padding. `longest_query`: no request has more tokens, padding included."""

    num_tokens: int
    num_requests: int
    num_logits: int
    longest_query: int
    is_static: bool = False  # one of the few shapes that graphs are captured for

    @property
    def is_decode(self) -> bool:
        return self.longest_query == 1


def row_shape(
    num_tokens: int, num_requests: int, num_logits: int, longest_query: int, multiple: int
) -> PaddedShape:
    """Tokens and logits rounded up to `multiple`, for an eager step. Each added token is a request
    of its own, and none is added to none."""
    padding = -num_tokens % multiple
    return PaddedShape(
        num_tokens + padding,
        num_requests + padding,
        num_logits + -num_logits % multiple,
        max(longest_query, min(padding, 1)),
    )


class PaddedShapes:
    """A worker's static shapes, all of them multiples of `multiple`; `interval` is
    q_padding_interval_size."""

    def __init__(
        self, max_batch_tokens: int, max_requests: int, interval: int, multiple: int = 1
    ) -> None:
        self.max_batch_tokens, self.max_requests = max_batch_tokens, max_requests
        self._multiple = multiple
        self.decode_sizes = _decode_sizes(min(max_requests, max_batch_tokens), interval, multiple)
        self.mixed_sizes = _powers_of_two(_SMALLEST_MIXED, max_batch_tokens, multiple)
        decode, mixed = self.decode_sizes[-1], self.mixed_sizes[-1]
        # of the largest shape, padding included; it has as many logits as tokens
        self.most_tokens = max(decode, mixed)
        self.most_requests = max(decode, self._mixed_requests(mixed))

    def decode(self, size: int) -> PaddedShape:
        return PaddedShape(size, size, size, 1, is_static=True)

    def shape_of(
        self, num_tokens: int, num_requests: int, num_logits: int, longest_query: int
    ) -> PaddedShape | None:
        """The smallest static shape that holds such a step; None if it is empty or none does: a
        step that scores a prompt, or verifies drafts, may need more logits than rows."""
        if num_tokens == 0:
            return None
        if longest_query == 1 and num_tokens <= self.decode_sizes[-1]:
            return self.decode(_at_least(self.decode_sizes, num_tokens))
        if num_tokens > self.mixed_sizes[-1] or num_requests > self.max_requests:
            return None
        if num_logits > self.decode_sizes[-1]:  # more than the memory that all graphs share
            return None
        tokens = _at_least(self.mixed_sizes, num_tokens)
        most = min(tokens, self.decode_sizes[-1])
        logits = _at_least(_powers_of_two(_FEWEST_LOGITS, most, self._multiple), num_logits)
        # a chunk may be as long as the step
        return PaddedShape(tokens, self._mixed_requests(tokens), logits, tokens, is_static=True)

    def _mixed_requests(self, tokens: int) -> int:
        return min(self.max_requests, tokens) + 1  # one more: padding tokens belong to a request


def _decode_sizes(most: int, interval: int, multiple: int) -> tuple[int, ...]:
    """1, 2, 4, then steps of `interval` to 64, then growing steps; at most 40 sizes, all
    multiples of `multiple`, the last one at least `most`."""
    share = 8  # beyond 64 a step is a share of the size
    while True:
        sizes = [size for size in (1, 2, 4) if size < interval]
        size = interval
        while size < most:
            sizes.append(size)
            step = interval if size < _DENSE_UNTIL else size // share
            size += max(interval, _round_up(step, interval))
        sizes.append(size)
        rounded = sorted({_round_up(size, multiple) for size in sizes})
        kept = tuple(rounded[: bisect_left(rounded, most) + 1])
        if len(kept) <= MOST_DECODE_SIZES:
            return kept
        interval, share = 2 * interval, max(1, share - 1)


def _powers_of_two(first: int, most: int, multiple: int) -> tuple[int, ...]:
    """From `first` on, the last one cut to `most`; all rounded up to `multiple`."""
    sizes = [first]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return tuple(_round_up(min(size, most), multiple) for size in sizes)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _at_least(sizes: tuple[int, ...], number: int) -> int:
    return sizes[bisect_left(sizes, number)]
