"""Uniform numbers: reproducible, in range, and evenly spread."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.seeds import streams, uniforms


def test_they_are_a_function_of_their_three_inputs_alone() -> None:
    """The same seed gives other tokens in another batch."""
    seeds = np.array([1, 2, 2**63 - 1], np.uint64)
    siblings = np.array([0, 1, 2], np.uint64)
    positions = np.array([5, 6, 7])
    together = uniforms(streams(seeds, siblings), positions)
    alone = [
        uniforms(streams(seeds[i : i + 1], siblings[i : i + 1]), positions[i : i + 1])[0]
        for i in (2, 0, 1)
    ]
    assert together[[2, 0, 1]].tolist() == alone


def test_values_are_pinned() -> None:
    """A change of the hash would silently change every seeded answer."""
    seeds = np.array([0, 1, 42], np.uint64)
    got = uniforms(streams(seeds, np.zeros(3, np.uint64)), np.array([0, 1, 1000])) * 2**24
    assert got.astype(np.int64).tolist() == [2327157, 7100309, 9203123]


def test_range_and_spread() -> None:
    """1.0 would pick past the end of the distribution; a biased u would bias every sample."""
    n = 1 << 16
    u = uniforms(streams(np.full(n, 7, np.uint64), np.zeros(n, np.uint64)), np.arange(n))
    assert u.dtype == np.float32
    assert u.min() >= 0
    assert u.max() < 1
    counts, _ = np.histogram(u, bins=64, range=(0, 1))
    chi_squared = float(((counts - n / 64) ** 2 / (n / 64)).sum())
    assert chi_squared < 120  # 63 degrees of freedom: p ≈ 2e-5
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02
