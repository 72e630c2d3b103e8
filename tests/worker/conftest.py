"""Fixtures of the worker's model side: saved tiny models, and a runner over one of them."""

from __future__ import annotations

import os

# Before torch loads OpenMP: threads that spin while they wait make tests with two threads twenty
# times slower as soon as anything else runs on the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tests.support import tiny_models
from tests.support.in_process import InProcess
from tests.support.loading import load

# of InProcess, not of Configure: ample memory, where nothing that is cached is found again
ROOMY: Final = {"chunks": 198, "swap_chunks": 40, "max_requests": 32, "allow_block_sharing": False}


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
def served(saved: Callable[..., tuple[Path, PreTrainedModel]]) -> Callable[..., InProcess]:
    """A tiny model with a fresh runner and a fresh core; other settings go into Configure."""

    def make(
        config: Callable[[], PreTrainedConfig], *, depth: int = 1, **settings: Any
    ) -> InProcess:
        settings = {"max_batch_tokens": 256, **settings}
        own = {name: settings.pop(name, value) for name, value in ROOMY.items()}
        return InProcess(load(saved(config)[0], **settings), depth=depth, **own, **settings)

    return make


@pytest.fixture
def prompts() -> list[list[int]]:
    """Six prompts from one token to several pages and key blocks."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(tiny_models.VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (1, 7, 33, 4, 71, 130)
    ]
