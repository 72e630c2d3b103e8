"""Every model family through every mechanism of the paged memory: the tokens are the same.

The oracle is transformers' `generate`, one prompt at a time. Windows are smaller than most of the
prompts, so they are crossed everywhere. The table that a run prints has a row per family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig

from scheduler_svc.core.request import NewRequest, Sampling
from tests.support import tiny_models
from tests.support.family_configs import tiny_config
from tests.support.in_process import InProcess, Served
from tests.support.loading import PAGE_SIZE, load
from tests.support.oracle import generate
from worker.model.load import LoadedModel

LENGTHS = (3, 33, 9, 64, 20, 41, 50, 14)
MAX_TOKENS = (14, 9, 20, 8, 16, 12, 10, 18)
TABLE: dict[str, list[str]] = {}

Tokens = dict[tuple[str, int], list[int]]


class Family:
    """A tiny model under our worker, loaded with `settings`, and what `generate` says."""

    def __init__(
        self, name: str, folder: Path, config: PreTrainedConfig | None = None, **settings: object
    ) -> None:
        self.name = name
        self.folder = folder
        self._settings = settings
        model = tiny_models.save(config or tiny_models.SERVED[name](), folder)
        generator = torch.Generator().manual_seed(11)
        prompts = [
            torch.randint(tiny_models.VOCAB_SIZE, (length,), generator=generator).tolist()
            for length in LENGTHS
        ]
        self.requests = [
            NewRequest(f"r{i}", prompt, count, Sampling(temperature=0))
            for i, (prompt, count) in enumerate(zip(prompts, MAX_TOKENS, strict=True))
        ]
        self.right: Tokens = {
            (new.request_id, 0): generate(model, new.prompt_token_ids, new.max_tokens)
            for new in self.requests
        }
        self._loaded: dict[int, LoadedModel] = {}

    def loaded(self, page_size: int = PAGE_SIZE) -> LoadedModel:
        if page_size not in self._loaded:
            self._loaded[page_size] = load(self.folder, page_size=page_size, **self._settings)
        return self._loaded[page_size]

    def serve(self, page_size: int = PAGE_SIZE, **settings: object) -> Served:
        """All requests at once, right tokens checked."""
        process = InProcess(self.loaded(page_size), **settings)  # type: ignore[arg-type]
        served = process.serve(self.requests)
        assert served.tokens == self.right
        return served

    def tiny_pool(self) -> int:
        """Chunks that hold the longest request and nothing more."""
        geometry = InProcess(self.loaded()).state.geometry
        longest = max(a + b for a, b in zip(LENGTHS, MAX_TOKENS, strict=True))
        return geometry.chunks_at_most(longest)


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", autouse=True)
def table(show: Callable[[str], None]) -> Iterator[None]:
    """Shows the table when all families have been tried."""
    yield
    show("family".ljust(16) + "".join(column.ljust(12) for column in CHECKS))
    for name, cells in TABLE.items():
        show(name.ljust(16) + "".join(cell.ljust(12) for cell in cells))


def alone(family: Family) -> str:
    process = InProcess(family.loaded(), allow_block_sharing=False)
    tokens: Tokens = {}
    for new in family.requests:
        tokens |= process.serve([new]).tokens
    assert tokens == family.right
    return "equal"


def batched(family: Family) -> str:
    served = family.serve(max_batch_tokens=29)
    assert served.steps < sum(MAX_TOKENS)
    return "equal"


def tiny_pool(family: Family) -> str:
    served = family.serve(chunks=family.tiny_pool(), safety_margin=0.0, max_batch_tokens=8)
    assert served.soft_resets
    return f"equal ({served.soft_resets})"


def swap(family: Family) -> str:
    served = family.serve(
        chunks=family.tiny_pool(), swap_chunks=200, safety_margin=0.0, max_batch_tokens=8
    )
    assert served.offloads
    assert served.restores
    assert not served.soft_resets
    return f"equal ({served.restores})"


def prefix_hit(family: Family) -> str:
    process = InProcess(family.loaded())
    assert process.serve(family.requests).tokens == family.right
    again = process.serve(family.requests)
    assert again.tokens == family.right
    assert again.cached_tokens > sum(LENGTHS) // 2
    return f"equal ({again.cached_tokens})"


def siblings(family: Family) -> str:
    greedy = [
        NewRequest(r.request_id, r.prompt_token_ids, r.max_tokens, r.sampling, n=3)
        for r in family.requests[:4]
    ]
    sampled = [
        NewRequest(f"s{i}", r.prompt_token_ids, r.max_tokens, Sampling(1.0, seed=i), n=3)
        for i, r in enumerate(family.requests[:4])
    ]
    together = InProcess(family.loaded(), max_requests=12).serve(greedy + sampled)
    assert together.tail_copies
    for (name, _), tokens in together.tokens.items():
        if (name, 0) in family.right:
            assert tokens == family.right[name, 0]
    alone = Served()
    for new in sampled:
        # one group at a time, unchunked: only company and chunks differ
        process = InProcess(family.loaded(), max_batch_tokens=128, allow_block_sharing=False)
        alone.tokens |= process.serve([new]).tokens
    for who, tokens in alone.tokens.items():
        assert together.tokens[who] == tokens
    assert len({tuple(alone.tokens["s3", i]) for i in range(3)}) == 3, "siblings must differ"
    return f"equal ({together.tail_copies})"


def run_ahead(family: Family) -> str:
    """Short of memory, so that plans are made upon preemptions whose results are not back."""
    served = family.serve(
        depth=2, chunks=family.tiny_pool(), swap_chunks=20, safety_margin=0.0, max_batch_tokens=8
    )
    assert served.offloads + served.soft_resets
    return f"equal ({served.steps})"


def padded(family: Family) -> str:
    """Static inputs of few shapes, as graphs are replayed with; both I/O sets in turns."""
    family.serve(is_padded=True, depth=2, max_batch_tokens=100)
    return "equal"


def reference(family: Family) -> str:
    family.serve(attention="reference", is_padded=True)
    return "equal"


CHECKS: dict[str, Callable[[Family], str]] = {
    "alone": alone,
    "batched": batched,
    "tiny pool": tiny_pool,
    "swap": swap,
    "prefix hit": prefix_hit,
    "n=3": siblings,
    "run ahead": run_ahead,
    "padded": padded,
    "reference": reference,
}


@pytest.mark.parametrize("family", list(tiny_models.SERVED), indirect=True)
def test_tokens_are_the_same_whatever_the_memory_does(family: Family) -> None:
    """A window, a table, a swap, a hit or a fork that is off by one, for one family only."""
    cells = TABLE.setdefault(family.name, [])
    for check in CHECKS.values():
        cells.append("WRONG")
        cells[-1] = check(family)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"], indirect=True)
@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 1},
        {"page_size": 16},
        {"max_batch_tokens": 8},
        {"max_batch_tokens": 400},
        {"policy": "prefill_first"},
        {"policy": "priority"},
        {"policy": "static"},
        {"depth": 2},
        {"allow_block_sharing": False},
        {"deterministic": True},
        {"deterministic": True, "is_padded": True, "depth": 2},
        {"attention": "reference", "depth": 2},
    ],
    ids=str,
)
def test_tokens_are_the_same_whatever_the_settings(
    family: Family, settings: dict[str, object]
) -> None:
    """A setting that should cost or gain time changes an answer."""
    family.serve(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_tokens_are_the_same_with_narrower_keys_and_values(name: str, tmp_path: Path) -> None:
    """A place that takes the pool for the model's dtype: a kernel, a transfer, a table of layers;
    gpt2's layers are attended to one by one."""
    family = Family(name, tmp_path, kv_cache_dtype="float16")
    assert family.loaded().kv_dtype == torch.float16
    for check in (batched, swap, prefix_hit, run_ahead, reference):
        check(family)
    family.serve(page_size=16)  # where the C kernel reads them as they lie


# Families that differ in how they ask for attention. All others: tests/families.
UNUSUAL = {
    "bart": "counts positions itself; its base model is passed by",
    "falcon, grouped": "has attention classes of its own; keys repeated for every query",
    "gemma4_text, shared": "full layers with other heads; layers that read the keys of others",
    "gpt_neo": "has attention classes of its own, with windows in their masks",
    "hunyuan_v1_moe": "reads the weight of a linear layer",
    "jetmoe": "more KV heads than its configuration says",
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_tokens_are_the_same_for_unusual_families(name: str, tmp_path: Path) -> None:
    """What was seen of the model at load is not what its memory is laid out for."""
    family = Family(name, tmp_path, tiny_config(name))
    served = family.serve(
        chunks=family.tiny_pool(),
        swap_chunks=20,
        safety_margin=0.0,
        max_batch_tokens=29,
        depth=2,
        is_padded=True,
    )
    assert served.offloads + served.soft_resets
