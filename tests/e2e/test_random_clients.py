"""Random lives over real gRPC: fixed ones in `make test`, new ones in `make test-slow`."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable

import pytest

from tests.e2e.random_clients import Outcome, live

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
    for kind in ("ended by length", "ended by stop", "ALREADY_EXISTS", "INVALID_ARGUMENT"):
        assert outcome.calls[kind], f"{kind} did not happen"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_new_random_clients(show: Callable[[str], None]) -> None:
    """The same for LIVES_SECONDS (600) with seeds from LIVES_SEED on, or from a random one."""
    first = int(os.environ.get("LIVES_SEED") or random.SystemRandom().randrange(1 << 30))
    ends_at = time.monotonic() + float(os.environ.get("LIVES_SECONDS", "600"))
    seed = first
    while time.monotonic() < ends_at:
        try:
            asyncio.run(live(seed, 8 * CALLS))
        except BaseException as error:
            error.add_note(f"found by LIVES_SEED={seed}")
            raise
        seed += 1
    show(f"random clients: {seed - first} lives, seeds {first} to {seed - 1}")
