"""The long simulation, some of it; the million steps are a command: tests/bench/million.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.bench.million import run


def check(steps: int, show: Callable[[str], None]) -> None:
    """What has to happen in a run for it to show anything."""
    tally = run(steps)
    show(f"simulated: {tally}")
    assert tally.counters["offloads"]
    assert tally.counters["restores"]
    assert tally.counters["soft_resets"]
    assert tally.forks
    assert tally.aborts
    assert tally.deaths
    assert tally.cached_tokens
    assert tally.scores
    assert tally.late_masks
    assert tally.verified
    assert tally.histories


def test_two_thousand_steps_of_everything(show: Callable[[str], None]) -> None:
    """An interleaving of aborts, priorities, forks, swaps and prefix hits breaks a token."""
    check(2_000, show)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_thousand_steps_of_everything(show: Callable[[str], None]) -> None:
    """The same, long enough for rare interleavings; CI runs it."""
    check(20_000, show)
