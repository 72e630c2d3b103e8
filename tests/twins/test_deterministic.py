"""Deterministic mode: a token's logits have the same bits whatever happened around its request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from protos.plan import StepPlan
from scheduler_svc.core.request import NewRequest, Sampling
from tests.support import tiny_models
from tests.support.in_process import InProcess
from tests.support.loading import load
from worker.model.load import LoadedModel
from worker.runner import Launched
from worker.step.sampler import SampleRows

Logits = dict[tuple[str, int], torch.Tensor]  # of the token at a position of a request


class Recording:
    """Serves requests and keeps the logits that each token was chosen from."""

    def __init__(self, loaded: LoadedModel, **settings: Any) -> None:
        self.process = InProcess(loaded, deterministic=True, **settings)
        self.logits: Logits = {}
        runner = self.process.runner
        self._launch, self._sample = runner.launch, runner._sample
        runner.launch, runner._sample = self.launch, self.sample  # type: ignore[method-assign]

    def launch(self, plan: StepPlan) -> Launched:
        step = self.process.state.in_flight[-1]
        self._samples = [
            (step.requests[named].request_id, int(step.ends[place]))
            for place, named in zip(step.sampled.tolist(), step.sampled_for.tolist(), strict=True)
        ]
        return self._launch(plan)

    def sample(self, logits: torch.Tensor, samples: SampleRows) -> torch.Tensor:
        for token, row in zip(self._samples, logits, strict=True):
            assert token not in self.logits, "a token was sampled twice"
            self.logits[token] = row.clone()
        return self._sample(logits, samples)


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
    alone = Recording(loaded, max_batch_tokens=100, allow_block_sharing=False)
    for new in requests:
        alone.process.serve([new])
    assert len(alone.logits) == 6 * 12

    small = alone.process.state.geometry.chunks_at_most(62)
    for settings in (
        {},
        {"max_batch_tokens": 8},
        {"depth": 2, "is_padded": True},
        {"chunks": small, "max_batch_tokens": 9, "safety_margin": 0.0},
        {"chunks": small, "max_batch_tokens": 9, "safety_margin": 0.0, "swap_chunks": 40},
    ):
        other = Recording(loaded, **settings)
        served = other.process.serve(requests)
        if "chunks" in settings:
            assert served.offloads if "swap_chunks" in settings else served.soft_resets
        assert other.logits.keys() == alone.logits.keys()
        for token, row in alone.logits.items():
            assert torch.equal(other.logits[token], row), (settings, token)
