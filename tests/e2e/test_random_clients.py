"""Random lives over real gRPC: some fixed ones always, fresh ones by `make lives`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.support.fresh_seeds import SECONDS, fresh_seeds
from tests.support.random_clients import Outcome, live

SEEDS = (1, 2, 3)  # what a longer run finds is added here
CALLS = 20  # of each client


def told(seed: int, outcome: Outcome) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in sorted(outcome.calls.items()))
    return f"seed {seed}: {outcome.deaths} deaths, {outcome.faults} faults; {counts}"


@pytest.mark.parametrize("seed", SEEDS)
def test_random_clients(seed: int, show: Callable[[str], None]) -> None:
    """A wrong token, a stream without an end, or a block that nobody gives back."""
    outcome = asyncio.run(live(seed, CALLS))
    show(told(seed, outcome))
    for kind in (
        "ended by length",
        "ended by stop",
        "resumed amid an answer",
        "ALREADY_EXISTS",
        "INVALID_ARGUMENT",
    ):
        assert outcome.calls[kind], f"{kind} did not happen"


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_new_random_clients(show: Callable[[str], None]) -> None:
    """As above, in rarer orders of events."""
    count = 0
    for seed in fresh_seeds():
        count += 1
        try:
            asyncio.run(live(seed, 8 * CALLS))
        except BaseException as error:
            error.add_note(f"random clients with seed {seed}: add it to SEEDS in {__name__}")
            raise
    show(f"random clients: {count} lives, the last one with seed {seed}")
