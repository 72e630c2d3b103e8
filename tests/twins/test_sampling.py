"""Sampling fields and log probabilities through every mechanism of the paged memory.

The oracle is transformers: its model, one whole sequence per token, and its logits processors. The
table that a run prints has a row per field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from scheduler_svc.core.request import NewRequest, Sampling, TokenScore
from tests.support import tiny_models
from tests.support.in_process import InProcess, Served
from tests.support.loading import load

LENGTHS = (3, 33, 9, 40, 14)
MAX_TOKENS = (12, 9, 14, 8, 12)
NUM_CANDIDATES = 3
TABLES: dict[str, dict[str, list[str]]] = {}


class CountPenalties(LogitsProcessor):
    """frequency_penalty and presence_penalty as OpenAI defines them; transformers has neither."""

    def __init__(self, prompt_length: int, frequency: float, presence: float) -> None:
        self._prompt_length = prompt_length
        self._frequency, self._presence = frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = input_ids[0, self._prompt_length :].bincount(minlength=scores.shape[1])
        return scores - self._frequency * counts - self._presence * (counts > 0)


@dataclass
class Right:
    """What transformers says of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)  # [V] of the unchanged logits


@dataclass
class Case:
    """One field: a request's sampling, and the processors that mean the same. `free` are the tokens
    of the answer without the field."""

    sampling: Callable[[list[int]], Sampling]
    processors: Callable[[NewRequest], list[LogitsProcessor]]


def _greedy(**settings: object) -> Sampling:
    return Sampling(temperature=0.0, logprobs=NUM_CANDIDATES, **settings)  # type: ignore[arg-type]


CASES: dict[str, Case] = {
    "nothing": Case(lambda _: _greedy(), lambda _: []),
    "repetition_penalty": Case(
        lambda _: _greedy(repetition_penalty=1.5),
        lambda new: [RepetitionPenaltyLogitsProcessor(new.sampling.repetition_penalty)],
    ),
    "frequency, presence": Case(
        lambda _: _greedy(frequency_penalty=0.75, presence_penalty=0.25),
        lambda new: [CountPenalties(len(new.prompt_token_ids), 0.75, 0.25)],
    ),
    "logit_bias": Case(
        lambda free: _greedy(logit_bias=tuple(sorted({free[0]: -50.0, free[3]: 2.5}.items()))),
        lambda new: [
            SequenceBiasLogitsProcessor(
                [[[token_id], bias] for token_id, bias in new.sampling.logit_bias]
            )
        ],
    ),
    "bad_words": Case(
        lambda free: _greedy(bad_words=((free[1], free[2]), (free[3],), tuple(free[4:7]))),
        lambda new: [NoBadWordsLogitsProcessor([list(word) for word in new.sampling.bad_words])],
    ),
    "min_tokens": Case(
        lambda free: _greedy(stop_token_ids=frozenset(free[1:3]), min_tokens=5),
        lambda new: [
            MinNewTokensLengthLogitsProcessor(
                len(new.prompt_token_ids), 5, sorted(new.sampling.stop_token_ids)
            )
        ],
    ),
}


def oracle(model: PreTrainedModel, new: NewRequest, case: Case) -> Right:
    """The greedy answer, by whole sequences."""
    right, processors = Right(), LogitsProcessorList(case.processors(new))
    while len(right.tokens) < new.max_tokens:
        ids = torch.tensor([[*new.prompt_token_ids, *right.tokens]])
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits[:, -1].float()
        right.logprobs.append(logits[0].log_softmax(dim=-1))
        right.tokens.append(int(processors(ids, logits.clone())[0].argmax()))
        if right.tokens[-1] in new.sampling.stop_token_ids:
            break
    return right


class Model:
    """A tiny model, its requests for each case, and what transformers says of them."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.model = tiny_models.save(tiny_models.SERVED[name](), folder)
        self.loaded = load(folder)
        generator = torch.Generator().manual_seed(5)
        self.prompts = [
            torch.randint(tiny_models.VOCAB_SIZE, (length,), generator=generator).tolist()
            for length in LENGTHS
        ]
        geometry = InProcess(self.loaded).state.geometry
        longest = max(a + b for a, b in zip(LENGTHS, MAX_TOKENS, strict=True))
        self.tiny_pool = geometry.chunks_at_most(longest)
        plain = Case(lambda _: Sampling(0), lambda _: [])
        unlimited = [NewRequest(f"r{i}", p, 18, Sampling(0)) for i, p in enumerate(self.prompts)]
        self.free = [oracle(self.model, new, plain).tokens for new in unlimited]

    def requests(self, case: Case) -> list[NewRequest]:
        return [
            NewRequest(f"r{i}", prompt, count, case.sampling(self.free[i]))
            for i, (prompt, count) in enumerate(zip(self.prompts, MAX_TOKENS, strict=True))
        ]


@pytest.fixture(scope="module", params=["gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", autouse=True)
def table(show: Callable[[str], None]) -> Iterator[None]:
    """Shows the tables when everything has been tried."""
    yield
    for name, rows in TABLES.items():
        show(name.ljust(24) + "".join(column.ljust(13) for column in WAYS))
        for case, cells in rows.items():
            show(case.ljust(24) + "".join(cell.ljust(13) for cell in cells))


Way = Callable[[Model, list[NewRequest]], Served]


def alone(model: Model, requests: list[NewRequest]) -> Served:
    process, all_served = InProcess(model.loaded, allow_block_sharing=False), Served()
    for new in requests:
        served = process.serve([new])
        all_served.tokens |= served.tokens
        all_served.requests |= served.requests
    return all_served


def chunked(model: Model, requests: list[NewRequest]) -> Served:
    return InProcess(model.loaded, max_batch_tokens=17).serve(requests)


def tiny_pool(model: Model, requests: list[NewRequest]) -> Served:
    process = InProcess(model.loaded, chunks=model.tiny_pool, safety_margin=0.0, max_batch_tokens=8)
    served = process.serve(requests)
    assert served.soft_resets
    return served


def swap(model: Model, requests: list[NewRequest]) -> Served:
    process = InProcess(
        model.loaded, chunks=model.tiny_pool, swap_chunks=200, safety_margin=0, max_batch_tokens=8
    )
    served = process.serve(requests)
    assert served.restores
    return served


def prefix_hit(model: Model, requests: list[NewRequest]) -> Served:
    process = InProcess(model.loaded)
    process.serve(requests)
    served = process.serve(requests)
    if all(new.prompt_logprobs is None for new in requests):
        assert served.cached_tokens > sum(LENGTHS) // 2
    return served


def run_ahead(model: Model, requests: list[NewRequest]) -> Served:
    return InProcess(
        model.loaded, depth=2, chunks=model.tiny_pool, swap_chunks=20, safety_margin=0.0
    ).serve(requests)


def death(model: Model, requests: list[NewRequest]) -> Served:
    process = InProcess(model.loaded, depth=2, max_batch_tokens=24)
    return process.serve(requests, deaths=(2, 5, 9, 16))


WAYS: dict[str, Way] = {
    "alone": alone,
    "chunked": chunked,
    "tiny pool": tiny_pool,
    "swap": swap,
    "prefix hit": prefix_hit,
    "run ahead": run_ahead,
    "worker death": death,
}


def _check_scores(
    scores: Sequence[TokenScore], tokens: Sequence[int], right: Sequence[torch.Tensor]
) -> float:
    """The largest difference of a log probability."""
    assert [score.token_id for score in scores] == list(tokens)
    worst = 0.0
    for score, logprobs in zip(scores, right, strict=True):
        top = logprobs.topk(len(score.top))
        found = torch.tensor([logprob for _, logprob in score.top])
        worst = max(worst, float((found - top.values).abs().max()))
        worst = max(worst, abs(score.logprob - float(logprobs[score.token_id])))
        higher = int((logprobs > logprobs[score.token_id] + 1e-4).sum())
        as_high = int((logprobs > logprobs[score.token_id] - 1e-4).sum())
        assert higher < score.rank <= max(as_high, 1)
    return worst


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_transformers_processors(model: Model, name: str) -> None:
    """A history, a ban or a bias that misses a token after a preemption, a hit or a death."""
    case = CASES[name]
    requests = model.requests(case)
    right = [oracle(model.model, new, case) for new in requests]
    if name != "nothing":
        cut = [free[: new.max_tokens] for free, new in zip(model.free, requests, strict=True)]
        assert [r.tokens for r in right] != cut, "the field changes nothing"
    cells = TABLES.setdefault(model.name, {}).setdefault(name, [])
    for way in WAYS.values():
        cells.append("WRONG")
        served = way(model, requests)
        assert [served.tokens[new.request_id, 0] for new in requests] == [r.tokens for r in right]
        worst = max(
            _check_scores(served.requests[new.request_id, 0].scores, of.tokens, of.logprobs)
            for new, of in zip(requests, right, strict=True)
        )
        assert worst < 1e-4
        cells[-1] = f"equal {worst:.0e}"


@pytest.mark.parametrize("max_tokens", [0, 6])
def test_prompts_are_scored_as_by_transformers(model: Model, max_tokens: int) -> None:
    """A chunk's last token that scores nothing, a hit that skips what was asked for."""
    requests = [
        NewRequest(f"r{i}", p, max_tokens, Sampling(0), prompt_logprobs=NUM_CANDIDATES)
        for i, p in enumerate(model.prompts)
    ]
    right = []
    for prompt in model.prompts:
        with torch.inference_mode():
            logits = model.model(torch.tensor([prompt]), use_cache=False).logits[0].float()
        right.append(list(logits.log_softmax(dim=-1)[:-1]))
    row = f"prompt_logprobs, {max_tokens}"
    cells = TABLES.setdefault(model.name, {}).setdefault(row, [])
    for name, way in WAYS.items():
        cells.append("WRONG")
        if max_tokens == 0 and name in ("tiny pool", "swap"):
            cells[-1] = "(no growth)"  # prompts that are only scored wait for room instead
            continue
        served = way(model, requests)
        worst = max(
            _check_scores(served.requests[new.request_id, 0].prompt_scores, prompt[1:], of)
            for new, prompt, of in zip(requests, model.prompts, right, strict=True)
        )
        assert worst < 1e-4
        cells[-1] = f"equal {worst:.0e}"


def test_a_seed_gives_the_same_tokens_whatever_happens(model: Model) -> None:
    """A sample that depends on its neighbours, or on when its history was put together."""
    requests = [
        NewRequest(
            f"r{i}",
            prompt,
            count,
            Sampling(
                temperature=1.2,
                top_k=40,
                top_p=0.95,
                min_p=0.01,
                repetition_penalty=1.2,
                frequency_penalty=0.5,
                presence_penalty=-0.25,
                seed=i,
                min_tokens=4,
                stop_token_ids=frozenset(range(40)),
                logit_bias=((7, 3.0), (9, -2.0)),
                bad_words=((7, 7), (11,)),
            ),
            n=2 if i % 2 else 1,
        )
        for i, (prompt, count) in enumerate(zip(model.prompts, MAX_TOKENS, strict=True))
    ]
    singles = [replace(new, n=1, index=k) for new in requests for k in range(new.n)]
    right = {}
    for single in singles:
        right |= alone(model, [single]).tokens
    assert any(
        len(tokens) < new.max_tokens for new, tokens in zip(singles, right.values(), strict=True)
    )
    cells = TABLES.setdefault(model.name, {}).setdefault("all, seeded, n=2", [])
    for name, way in WAYS.items():
        cells.append("WRONG")
        if name == "tiny pool":  # holds one answer of the longest request, not two
            served = InProcess(
                model.loaded, chunks=2 * model.tiny_pool, safety_margin=0.0, max_batch_tokens=8
            ).serve(requests)
        elif name in ("swap", "run ahead"):
            served = InProcess(
                model.loaded, chunks=2 * model.tiny_pool, swap_chunks=20, safety_margin=0.0,
                max_batch_tokens=8, depth=2 if name == "run ahead" else 1,
            ).serve(requests)  # fmt: skip
        else:
            served = way(model, requests)
        assert served.tokens == right
        cells[-1] = "equal"
