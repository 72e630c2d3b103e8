"""Deterministic mode: a token's logits have the same bits whatever happened around its request."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scheduler_svc.core.request import NewRequest, Sampling
from tests.support import tiny_models
from tests.support.in_process import InProcess
from tests.support.loading import load


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_bits_survive_company_chunks_and_preemption(name: str, tmp_path: Path) -> None:
    """The promise of `deterministic`: without it a preempted request may go on differently."""
    tiny_models.save(tiny_models.SERVED[name](), tmp_path)
    loaded = load(tmp_path)
    generator = torch.Generator().manual_seed(5)
    requests = [
        NewRequest(
            f"r{i}",
            torch.randint(tiny_models.VOCAB_SIZE, (length,), generator=generator).tolist(),
            12,
            Sampling(0.8, seed=i),
        )
        for i, length in enumerate((3, 33, 50, 20, 41, 14))
    ]
    alone = InProcess(loaded, deterministic=True, max_batch_tokens=100, allow_block_sharing=False)
    expected = {}
    for new in requests:
        expected |= alone.serve([new]).logits
    assert sum(map(len, expected.values())) == 6 * 12

    small = alone.state.geometry.chunks_at_most(62)
    for settings in (
        {},
        {"max_batch_tokens": 8},
        {"depth": 2, "is_padded": True},
        {"chunks": small, "max_batch_tokens": 9, "safety_margin": 0.0},
        {"chunks": small, "max_batch_tokens": 9, "safety_margin": 0.0, "swap_chunks": 40},
    ):
        other = InProcess(loaded, deterministic=True, **settings)
        served = other.serve(requests)
        if "chunks" in settings:
            assert served.offloads if "swap_chunks" in settings else served.soft_resets
        assert sum(map(len, other.logits)) == 6 * 12, "a token was sampled twice"
        for who, rows in expected.items():
            assert torch.equal(served.logits[who], rows), (settings, who)
