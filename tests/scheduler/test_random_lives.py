"""Random lives of the engine (random_lives.py): some fixed ones always, fresh ones by `make lives`.

A seed that fails is printed with what went wrong, and is the bug report: add it to REGRESSIONS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.support.fresh_seeds import SECONDS, fresh_seeds
from tests.support.random_lives import Life

# Seeds of lives that went wrong once. What a seed means changes with random_lives.py: what one has
# found also needs a test of its own.
REGRESSIONS: list[int] = []
SEEDS = [*REGRESSIONS, *range(1, 13)]


def test_the_same_lives_every_time() -> None:
    """A token is lost, doubled or wrong, an answer does not end or ends twice, a request pays for
    another's fault, memory leaks: in some order of events that nobody thought of."""
    happened: Counter[str] = Counter()
    for seed in SEEDS:
        happened += live(seed)
    rare = {"guilty", "did not fit", "stop", "abort", "fault by a poison", "death by a poison"}
    assert rare <= set(happened), f"the lives have become dull: {happened}"


def test_a_seed_is_a_life() -> None:
    """A failure that a seed reports cannot be seen again."""
    lives = [Life(7), Life(7)]
    for one in lives:
        one.run()
    first, second = (list(map(repr, one.bench.events)) for one in lives)
    assert first == second


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_lives_nobody_has_seen(show: Callable[[str], None]) -> None:
    """As above, in rarer orders of events."""
    count = 0
    for seed in fresh_seeds():
        live(seed)
        count += 1
    show(f"engine: {count} random lives, the last one with seed {seed}")


def live(seed: int) -> Counter[str]:
    """A whole life; what happened in it."""
    try:
        one = Life(seed)
        one.run()
    except Exception as error:
        error.add_note(f"random life with seed {seed}: add it to REGRESSIONS in {__name__}")
        raise
    return one.happened
