"""Speculation changes no bit: tokens, logits and log probabilities are those without drafts.

Each kind of request drafts in each circumstance. Its drafts are what it really answers, with a
mistake in some of them, so that steps verify right and wrong drafts; one column drafts from the
requests' own texts, as a server does. Deterministic mode computes rows alike whatever is beside
them, so equal means equal bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scheduler_svc.core.request import NewRequest, Request, Sampling
from scheduler_svc.core.scheduler import drafts_of
from tests.support import tiny_models
from tests.support.in_process import InProcess
from tests.support.loading import load
from worker.model.load import LoadedModel

GREEDY, SEEDED = Sampling(temperature=0), Sampling(temperature=0.9, top_p=0.95, seed=7)
SPECULATE = 5
TABLE: dict[str, dict[str, str]] = {}


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": GREEDY},
    "seeded": {"sampling": SEEDED},
    "penalties": {
        "sampling": replace(
            SEEDED, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.4
        )
    },
    "min_tokens": {
        "sampling": replace(GREEDY, min_tokens=9)
    },  # and the stop token that comes first
    "bad_words": {"sampling": GREEDY},  # what it would say else
    "logit_bias": {  # repeats itself
        "sampling": replace(SEEDED, logit_bias=((3, 40.0), (9, 40.0)))
    },
    "logprobs": {"sampling": replace(SEEDED, logprobs=3)},
    "n=2": {"sampling": SEEDED, "n": 2},
    "EOS in a draft": {"sampling": GREEDY},
    "short": {"sampling": GREEDY, "max_tokens": 6},
}
MAX_TOKENS = 20


class Model:
    """A tiny model, its requests, and what they answer without speculation."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        tiny_models.save(tiny_models.SERVED[name](), folder)
        self.loaded: LoadedModel = load(folder)
        generator = torch.Generator().manual_seed(5)
        self.requests = [
            NewRequest(
                kind,
                torch.randint(tiny_models.VOCAB_SIZE, (length,), generator=generator).tolist(),
                **{"max_tokens": MAX_TOKENS, **settings},
            )
            for (kind, settings), length in zip(
                KINDS.items(), (3, 33, 20, 41, 14, 8, 26, 17, 30, 11), strict=True
            )
        ]
        plain = self.process().serve(self.requests).tokens
        changes = {
            "EOS in a draft": {"stop_token_ids": frozenset(plain["EOS in a draft", 0][10:11])},
            "min_tokens": {"stop_token_ids": frozenset(plain["min_tokens", 0][4:6])},
            "bad_words": {
                "bad_words": (tuple(plain["bad_words", 0][5:7]), (plain["bad_words", 0][2],))
            },
        }
        self.requests = [
            replace(new, sampling=replace(new.sampling, **changes.get(new.request_id, {})))
            for new in self.requests
        ]
        self.right = self.process().serve(self.requests)
        # drafts go on where an answer ends
        longest = [
            replace(new, max_tokens=40, sampling=replace(new.sampling, stop_token_ids=frozenset()))
            for new in self.requests
        ]
        self.beyond = self.process().serve(longest).tokens

    def process(self, **settings: Any) -> InProcess:
        return InProcess(self.loaded, deterministic=True, **{"max_batch_tokens": 100, **settings})

    def tiny_pool(self) -> int:
        """Chunks that hold the longest request and little more."""
        longest = max(len(new.prompt_token_ids) + new.max_tokens for new in self.requests)
        return self.process().state.geometry.chunks_at_most(longest + 8)


class Guesses:
    """Drafts that are right, but for a mistake in half of them."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._rng = np.random.default_rng(0)

    def __call__(self, request: Request) -> list[int]:
        who = request.request_id, request.index
        answer = self._model.right.tokens[who]
        answer = answer + self._model.beyond[who][len(answer) :]
        guess = answer[request.num_output_tokens :][:SPECULATE]
        if guess and self._rng.random() < 0.5:
            guess[int(self._rng.integers(len(guess)))] = int(self._rng.integers(100))
        return guess


COLUMNS: dict[str, dict[str, Any]] = {
    "own text": {"propose": drafts_of},
    "guesses": {},
    "run ahead": {"depth": 2, "is_padded": True},
    "few tokens": {"max_batch_tokens": 22},
    "tiny pool": {"safety_margin": 0.0, "max_batch_tokens": 24},
    "swap": {"safety_margin": 0.0, "max_batch_tokens": 24, "swap_chunks": 60, "depth": 2},
    "prefix hit": {},
    "worker death": {"deaths": (4, 9, 10, 20), "depth": 2},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    return functools.cache(lambda name: Model(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module", autouse=True)
def table(show: Callable[[str], None]) -> Iterator[None]:
    """Shows, when all have been tried, which are equal, and drafts: accepted / verified."""
    yield
    for name, columns in TABLE.items():
        show(name.ljust(16) + "".join(column.ljust(15) for column in columns))
        for kind in KINDS:
            cells = (column.get(kind, "WRONG") for column in columns.values())
            show(kind.ljust(16) + "".join(cell.ljust(15) for cell in cells))


@pytest.mark.parametrize(
    ("name", "column"),
    [("llama", column) for column in COLUMNS]
    # windows: rejected tails, and pages that have left the window
    + [("gemma3", column) for column in ("run ahead", "few tokens", "swap")],
)
def test_drafts_change_no_bit(models: Callable[[str], Model], name: str, column: str) -> None:
    """A draft token that is wrong stays in the KV, in a penalty's history, among the samples before
    min_tokens, or in the answer; or one that is right is computed unlike a decode."""
    model = models(name)
    cells = TABLE.setdefault(model.name, {}).setdefault(column, {})
    guesses = Guesses(model)
    settings = {"propose": guesses, **COLUMNS[column]}
    if column in ("tiny pool", "swap"):
        settings["chunks"] = model.tiny_pool()
    deaths = settings.pop("deaths", ())
    process = model.process(**settings)
    drafting = [replace(new, speculate=SPECULATE) for new in model.requests]
    served = process.serve(drafting, deaths=deaths)
    if column == "prefix hit":
        served = process.serve(drafting)
        assert served.cached_tokens
    assert column != "tiny pool" or served.soft_resets
    assert column != "swap" or served.offloads
    for who, tokens in model.right.tokens.items():
        assert served.tokens[who] == tokens, who
        assert torch.equal(served.logits[who], model.right.logits[who]), who
        request = served.requests[who]
        assert request.scores == model.right.requests[who].scores, who
        cells[who[0]] = f"equal {request.num_accepted}/{request.num_drafted}"
    counters = process.state.counters
    assert 0 < counters.accepted < counters.drafted


def test_the_ends_lie_inside_of_drafts(models: Callable[[str], Model]) -> None:
    """Then the table says nothing about them."""
    model = models("llama")
    stopped = model.right.tokens["EOS in a draft", 0]
    assert 5 < len(stopped) < MAX_TOKENS
    assert stopped == model.beyond["EOS in a draft", 0][: len(stopped)]
    late = model.right.tokens["min_tokens", 0]
    assert len(late) >= 9
    banned = model.requests[list(KINDS).index("bad_words")].sampling.bad_words
    said = model.right.tokens["bad_words", 0]
    assert not any(tuple(said[i : i + 2]) == banned[0] for i in range(len(said)))
    assert banned[1][0] not in said
