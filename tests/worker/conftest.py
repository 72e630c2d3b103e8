"""Fixtures of the worker's model side: saved tiny models, and a runner over one of them."""

from __future__ import annotations

import os

# Before torch loads OpenMP: threads that spin while they wait make tests with two threads twenty
# times slower as soon as anything else runs on the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tests.support import tiny_models
from tests.support.loading import configure, load
from tests.support.planner import GreedySample, Planner
from worker.model.load import LoadedModel
from worker.runner import Runner

NUM_CHUNKS = 200
NUM_SWAP_CHUNKS = 40


@dataclass(slots=True, eq=False)
class Served:
    """A runner with its planner and stand-in sampler."""

    runner: Runner
    planner: Planner
    sample: GreedySample
    loaded: LoadedModel


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, PreTrainedModel]]:
    """A tiny model's folder, and the same model under transformers' own attention."""
    known: dict[str, tuple[Path, PreTrainedModel]] = {}

    def find(make: Callable[[], PreTrainedConfig]) -> tuple[Path, PreTrainedModel]:
        if make.__name__ not in known:
            folder = tmp_path_factory.mktemp(make.__name__)
            known[make.__name__] = (folder, tiny_models.save(make(), folder))
        return known[make.__name__]

    return find


@pytest.fixture
def served(saved: Callable[..., tuple[Path, PreTrainedModel]]) -> Callable[..., Served]:
    """A fresh runner over a tiny model; settings go into Configure."""

    def make(
        config: Callable[[], PreTrainedConfig], *, hide_outputs: bool = False, **settings: Any
    ) -> Served:
        loaded = load(saved(config)[0], **settings)
        sample = GreedySample()
        runner = Runner(loaded, configure(**settings), NUM_CHUNKS, sample, NUM_SWAP_CHUNKS)
        planner = Planner(loaded.geometry, NUM_CHUNKS, hide_outputs=hide_outputs)
        return Served(runner, planner, sample, loaded)

    return make


@pytest.fixture
def prompts() -> list[list[int]]:
    """Six prompts from one token to several pages and key blocks."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(tiny_models.VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (1, 7, 33, 4, 71, 130)
    ]
