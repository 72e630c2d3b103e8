"""Seeds that no run has used before, for the tests that play random lives (`make lives`).

LIVES_SECONDS (600) says for how long each of them plays; LIVES_SEED, which seed comes first, so
that what a run found can be seen again: CI takes it from the commit, any other run a random one.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator

SECONDS = float(os.environ.get("LIVES_SECONDS") or 600)


def fresh_seeds() -> Iterator[int]:
    """At least one; then on until the time is over."""
    seed = int(os.environ.get("LIVES_SEED") or secrets.randbits(40))
    ends_at = time.monotonic() + SECONDS
    while True:
        yield seed
        if time.monotonic() >= ends_at:
            return
        seed += 1
