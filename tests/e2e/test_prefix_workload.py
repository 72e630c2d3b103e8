"""64 requests that share a 512-token prefix, sent at once to a cold cache: shared, and not."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from client import AsyncChairlift, Chairlift
from tests.support.processes import Server

WORKLOAD = Path(__file__).parent.parent / "workloads" / "prefix.jsonl"
PREFIX_TOKENS = 512


def replay(tmp_path: Path, share: bool) -> tuple[float, int, list[tuple[int, ...]]]:
    """Seconds, prompt tokens found in the cache, and the answers."""
    workload = [json.loads(line) for line in WORKLOAD.read_text().splitlines()]

    async def run(address: str) -> list[tuple[int, ...]]:
        async with AsyncChairlift(address) as chairlift:
            answers = await asyncio.gather(
                *[
                    chairlift.complete(
                        row["prompt"], temperature=0, max_tokens=row["max_new"], ignore_eos=True
                    )
                    for row in workload
                ]
            )
        return [tuple(answer.token_ids) for answer in answers]

    with Server(tmp_path / f"{share}.log", 300, allow_block_sharing=share) as server:
        started = time.monotonic()
        answers = asyncio.run(run(server.address))
        seconds = time.monotonic() - started
        with Chairlift(server.address) as chairlift:
            hits = chairlift.get_cache().prefix_hits
    return seconds, hits, answers


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.timeout(1500)
def test_a_burst_computes_the_prefix_once(tmp_path: Path, show: Callable[[str], None]) -> None:
    """Everybody pays for the system prompt again."""
    shared_seconds, hits, shared = replay(tmp_path, True)
    whole_seconds, no_hits, whole = replay(tmp_path, False)
    show(
        f"prefix workload: {shared_seconds:.1f} s with sharing, {whole_seconds:.1f} s without: "
        f"{whole_seconds / shared_seconds:.1f} times; {hits} prompt tokens found"
    )
    assert no_hits == 0
    assert hits >= 0.95 * (len(shared) - 1) * PREFIX_TOKENS
    same = sum(a == b for a, b in zip(shared, whole, strict=True))
    assert same >= 0.9 * len(shared), "near ties may differ between batches, answers may not"
