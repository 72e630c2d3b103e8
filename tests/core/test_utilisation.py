"""How much of the pages that are held holds tokens, on the mixed workload."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from scheduler_svc.core.request import NewRequest
from scheduler_svc.engine.views import get_cache
from tests.support.simulation import Setup, Simulation
from tests.support.without_model import without_model

WORKLOAD = Path(__file__).parent.parent / "workloads" / "mixed.jsonl"


def test_pages_are_at_least_95_percent_full(show: Callable[[str], None]) -> None:
    """Blocks are taken before they are needed, or kept when they are not."""
    simulation = Simulation(
        Setup(num_blocks=2000, page_size=16, max_batch_tokens=2048, max_requests=64,
              max_model_len=2048, vocab_size=50_000)
    )  # fmt: skip
    simulation.worker.step = without_model  # type: ignore[method-assign]
    for line in WORKLOAD.read_text().splitlines():
        row = json.loads(line)
        simulation.submit(NewRequest(str(row["id"]), row["prompt"], row["max_new"]))
    stored = could_hold = 0.0
    while simulation.state.requests:
        simulation.plan()
        cache = get_cache(simulation.state)
        stored += cache.tokens_stored
        could_hold += cache.tokens_stored / cache.utilisation
        assert cache.utilisation > 0.9
        simulation.absorb()
    show(f"mixed workload: {stored / could_hold:.1%} of the held pages' places hold a token")
    assert stored / could_hold >= 0.95
