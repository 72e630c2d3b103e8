"""Splits the layers of a hybrid model into cache groups, so that chunks stay small.

A chunk belongs to one group at a time, and every group's blocks must tile it. With one group per
attention type it is as large as the least common multiple of two layer counts: 260 pages for ten
full and 52 sliding layers. Few large chunks are shared badly: a request's last chunk of each group
is mostly empty. More groups of fewer layers have smaller multiples; each costs a block table.

Pages of the two types may differ in size; then sizes are counted in a unit that divides both.

Owns: this choice, in numbers of layers. Pure. Does not own: which layers those are (geometry.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

LARGEST_SHARE: Final = 500  # a chunk is at most 1 / 500 of the pool ...
LARGEST_CHUNK: Final = 16 * 2**20  # ... and this many bytes, or one block of the whole model
LARGEST_PADDING: Final = 0.03  # share of the pool's bytes in unused slots, at worst
MOST_GROUPS: Final = 16  # tables cost the scheduler time in every step


@dataclass(frozen=True, slots=True)
class Tiling:
    """Layer slots of one group of each attention type; 0 if the model has no such layers."""

    full_slots: int
    sliding_slots: int
    units: tuple[int, int] = (1, 1)  # of a full layer's page, and of a sliding layer's

    @property
    def units_per_chunk(self) -> int:
        """Size of the smallest chunk that blocks of both types tile."""
        blocks = (self.full_slots * self.units[0], self.sliding_slots * self.units[1])
        return math.lcm(*(units for units in blocks if units))


def choose_tiling(
    num_full: int,
    num_sliding: int,
    unit_bytes: int,
    pool_bytes: int,
    units: tuple[int, int] = (1, 1),
) -> Tiling:
    """The split with the fewest groups whose chunk is small enough for a pool of pool_bytes; among
    those the one with the least padding, then the smallest chunk. If no split makes chunks small
    enough, the one with the smallest chunk, then the fewest groups.

    A model of one attention type has one group: its blocks tile any chunk.
    """
    if not num_full or not num_sliding:
        return Tiling(num_full, num_sliding, units)
    whole_model = unit_bytes * (num_full * units[0] + num_sliding * units[1])
    bound = min(pool_bytes // LARGEST_SHARE, max(LARGEST_CHUNK, whole_model))
    candidates = list(_candidates(num_full, num_sliding, units))

    def num_groups(tiling: Tiling) -> int:
        return -(-num_full // tiling.full_slots) - (-num_sliding // tiling.sliding_slots)

    def padding(tiling: Tiling) -> float:
        return padding_share(num_full, num_sliding, tiling)

    fitting = [tiling for tiling in candidates if tiling.units_per_chunk * unit_bytes <= bound]
    if fitting:
        return min(fitting, key=lambda t: (num_groups(t), padding(t), t.units_per_chunk))
    return min(candidates, key=lambda t: (t.units_per_chunk, num_groups(t), padding(t)))


def padding_share(num_full: int, num_sliding: int, tiling: Tiling) -> float:
    """The share of the pool's bytes in unused slots, at worst.

    A request's sliding groups never hold more tokens than its full ones. Between the extremes, no
    sliding tokens at all (long requests) and as many as full ones (short requests), the share is
    monotone, so one of the extremes is the worst case.
    """
    full = -(-num_full // tiling.full_slots) * tiling.full_slots
    sliding = -(-num_sliding // tiling.sliding_slots) * tiling.sliding_slots
    of_full, of_sliding = tiling.units
    idle = (full - num_full) * of_full + (sliding - num_sliding) * of_sliding
    return max((full - num_full) / full, idle / (full * of_full + sliding * of_sliding))


def _candidates(num_full: int, num_sliding: int, units: tuple[int, int]) -> Iterator[Tiling]:
    for full_slots in _slots(num_full):
        for sliding_slots in _slots(num_sliding):
            tiling = Tiling(full_slots, sliding_slots, units)
            groups = -(-num_full // full_slots) - (-num_sliding // sliding_slots)
            if (
                groups <= MOST_GROUPS
                and padding_share(num_full, num_sliding, tiling) < LARGEST_PADDING
            ):
                yield tiling


def _slots(num_layers: int) -> range:
    """Group sizes worth trying; with padding they may exceed the number of layers."""
    return range(1, num_layers + math.ceil(num_layers * 2 * LARGEST_PADDING) + 1)
