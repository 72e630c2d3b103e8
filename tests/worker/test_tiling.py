"""The choice of groups, against every split there is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.kv.tiling import (
    LARGEST_CHUNK,
    LARGEST_PADDING,
    MOST_GROUPS,
    Tiling,
    choose_tiling,
    padding_share,
)

KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.mark.parametrize(
    ("num_full", "num_sliding", "page_bytes", "pool_bytes", "expected"),
    [
        (5, 29, 64 * KIB, 8 * GIB, Tiling(5, 29)),  # 9 MiB, nothing idle
        (5, 29, 64 * KIB, 2 * GIB, Tiling(5, 30)),  # 9 MiB are too much: one slot in 35 idles
        (10, 52, 128 * KIB, 60 * GIB, Tiling(2, 52)),  # 32 MiB are too much for any pool
        (12, 12, 32 * KIB, 8 * GIB, Tiling(12, 12)),
        (0, 32, 64 * KIB, 1, Tiling(0, 32)),
        (1, 2, 1000, 1, Tiling(1, 1)),  # nothing fits: the smallest chunk
    ],
)
def test_known_models(num_full, num_sliding, page_bytes, pool_bytes, expected):
    """The choice for real shapes: other groups would waste memory, or the scheduler's time."""
    assert choose_tiling(num_full, num_sliding, page_bytes, pool_bytes) == expected


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(10, 40))
def test_no_better_split_exists(num_full, num_sliding, pool_log):
    """Fewest groups among those that keep the bounds; else the smallest chunk that there is."""
    page, pool = 64 * KIB, 2**pool_log

    def groups(t: Tiling) -> int:
        return -(-num_full // t.full_slots) - (-num_sliding // t.sliding_slots)

    chosen = choose_tiling(num_full, num_sliding, page, pool)
    assert groups(chosen) <= MOST_GROUPS
    assert padding_share(num_full, num_sliding, chosen) < LARGEST_PADDING
    bound = min(pool // 500, max(LARGEST_CHUNK, page * (num_full + num_sliding)))
    others = [
        Tiling(full, sliding)
        for full in range(1, num_full + 1)
        for sliding in range(1, num_sliding + 1)
        if padding_share(num_full, num_sliding, Tiling(full, sliding)) < LARGEST_PADDING
        and groups(Tiling(full, sliding)) <= MOST_GROUPS
    ]
    fitting = [groups(t) for t in others if t.units_per_chunk * page <= bound]
    if fitting:
        assert chosen.units_per_chunk * page <= bound
        assert groups(chosen) <= min(fitting)
    else:
        assert chosen.units_per_chunk <= min(t.units_per_chunk for t in others)


def test_padding_is_judged_at_its_worst():
    """Long requests hold many full blocks and few sliding ones: padding of full groups may not
    hide behind sliding layers that are not there."""
    assert padding_share(9, 91, Tiling(10, 91)) == pytest.approx(1 / 10)
    assert padding_share(10, 29, Tiling(10, 30)) == pytest.approx(1 / 40)
