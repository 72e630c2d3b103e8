"""Beam searches by the core and a real worker: the hypotheses of transformers' `generate`.

Scores are compared to 1e-4, tokens exactly, whatever memory and worker do meanwhile. The table that
a run prints has a row per family.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scheduler_svc.core.request import BeamSearch, FinishReason, NewRequest, Request, Sampling
from scheduler_svc.engine.ready_check import geometry_of
from tests.support import tiny_models
from tests.support.beam_oracle import generate_beams
from tests.support.check import check
from tests.support.in_process import InProcess
from tests.support.loading import load
from worker.runner import RunningStep

SEARCHES = [  # prompt tokens, max_tokens, the search, number of stop tokens
    (33, 12, BeamSearch(4, 4), 2),
    (9, 16, BeamSearch(3, 1, length_penalty=0.0), 0),
    (20, 14, BeamSearch(2, 2, early_stopping=True), 3),
    (5, 10, BeamSearch(5, 3, length_penalty=-1.0), 1),
]
TABLE: dict[str, list[str]] = {}


class Family:
    """A tiny model under our worker, and what `generate` finds."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        config = tiny_models.SERVED[name]()
        self.model = model = tiny_models.save(config, folder)
        self.loaded = load(folder)
        generator = torch.Generator().manual_seed(5)
        self.requests, self.right = [], {}
        for number, (length, max_tokens, beams, num_stops) in enumerate(SEARCHES):
            prompt = torch.randint(tiny_models.VOCAB_SIZE, (length,), generator=generator).tolist()
            early = generate_beams(model, prompt, 6, replace(beams, num_answers=beams.width))
            ends = list(dict.fromkeys(tokens[-1] for tokens, _ in early))
            stops = frozenset(ends[:num_stops])
            who = f"r{number}"
            beams = replace(beams, vocab_size=tiny_models.VOCAB_SIZE)
            sampling = Sampling(temperature=0.7, stop_token_ids=stops)  # which beams ignore
            self.requests.append(NewRequest(who, prompt, max_tokens, sampling, beams=beams))
            self.right[who] = generate_beams(model, prompt, max_tokens, beams, list(stops))

    def smallest_pool(self) -> int:
        """Chunks that hold each of the searches alone, and nothing more."""
        geometry = InProcess(self.loaded).state.geometry
        return max(
            geometry.chunks_at_most(
                len(new.prompt_token_ids) + new.max_tokens,
                num_beams=new.num_beams,
                num_prompt=len(new.prompt_token_ids),
            )
            for new in self.requests
        )

    def process(self, **settings: Any) -> InProcess:
        return InProcess(self.loaded, **{"max_requests": 16, **settings})

    def serve(self, process: InProcess, dies_at: int = 0) -> None:
        """All searches, beside greedy requests, to the end; the right hypotheses are checked. The
        worker is replaced by a new one at step `dies_at`, with a plan in flight."""
        beside = [
            NewRequest(f"beside{n}", new.prompt_token_ids, 9, Sampling(0.0))
            for n, new in enumerate(self.requests)
        ]
        answers = [
            (new, process.core.submit(new))
            for pair in zip(self.requests, beside, strict=True)
            for new in pair
        ]
        launched: deque[RunningStep] = deque()
        steps = 0
        while process.state.requests or launched:
            while (plan := process.core.plan()) is not None:
                launched.append(process.runner.launch(plan))
                steps += 1
                if steps == dies_at:
                    launched.popleft().wait()
                    launched.clear()
                    process.runner = self.process().runner  # its memory is empty
                    geometry = geometry_of(process.runner.ready())
                    process.core.scheduler.lose_worker(geometry)
            if launched:
                process.core.absorb(launched.popleft().wait())
        check(process.state)
        assert process.state.memory.device.is_free
        for new, family in answers:
            if new.beams is not None:
                self._check(new, family)

    def _check(self, new: NewRequest, family: list[Request]) -> None:
        found = [generated(request) for request in family]
        right = self.right[new.request_id]
        assert found == [tokens for tokens, _ in right]
        scores = [request.beam_score for request in family]
        assert scores == pytest.approx([score for _, score in right], rel=1e-4)
        for request in family:
            is_stopped = request.token_ids[-1] in new.sampling.stop_token_ids
            assert request.finish_reason is (
                FinishReason.STOP if is_stopped else FinishReason.LENGTH
            )


def generated(request: Request) -> list[int]:
    return request.token_ids[request.num_prompt_tokens :]


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", autouse=True)
def table(show: Callable[[str], None]) -> Iterator[None]:
    """Shows the table when all families have been tried."""
    yield
    show("beams".ljust(16) + "".join(column.ljust(14) for column in CHECKS))
    for name, cells in TABLE.items():
        show(name.ljust(16) + "".join(cell.ljust(14) for cell in cells))


def alone(family: Family) -> str:
    family.serve(family.process(allow_block_sharing=False))
    return "equal"


def tiny_pool(family: Family) -> str:
    process = family.process(chunks=family.smallest_pool(), safety_margin=0.0, max_batch_tokens=16)
    family.serve(process)
    assert process.state.counters.soft_resets
    return f"equal ({process.state.counters.soft_resets})"


def swap(family: Family) -> str:
    process = family.process(
        chunks=family.smallest_pool(), swap_chunks=300, safety_margin=0.0, max_batch_tokens=16
    )
    family.serve(process)
    assert process.state.counters.restores
    return f"equal ({process.state.counters.restores})"


def prefix_hit(family: Family) -> str:
    process = family.process()
    family.serve(process)
    before = process.state.memory.prefix_cache.num_hit
    family.serve(process)
    hit = process.state.memory.prefix_cache.num_hit - before
    assert hit > sum(length for length, *_ in SEARCHES) // 2
    return f"equal ({hit})"


def run_ahead(family: Family) -> str:
    process = family.process(
        depth=2, chunks=family.smallest_pool(), swap_chunks=20, safety_margin=0.0,
        max_batch_tokens=16, is_padded=True,
    )  # fmt: skip
    family.serve(process)
    assert process.state.counters.offloads
    return f"equal ({process.state.counters.offloads})"


def worker_death(family: Family) -> str:
    for step in (1, 6, 11):
        family.serve(family.process(), dies_at=step)
    return "equal (3)"


CHECKS: dict[str, Callable[[Family], str]] = {
    "alone": alone,
    "tiny pool": tiny_pool,
    "swap": swap,
    "prefix hit": prefix_hit,
    "run ahead": run_ahead,
    "worker death": worker_death,
}


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"], indirect=True)
def test_hypotheses_are_those_of_transformers(family: Family) -> None:
    """A beam that got another's KV, a token counted twice in a score, a search that ends early."""
    cells = TABLE.setdefault(family.name, [])
    for run in CHECKS.values():
        cells.append("WRONG")
        cells[-1] = run(family)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_penalties_and_bans_change_the_log_probabilities(family: Family) -> None:
    """As transformers' processors, which a beam search gives log probabilities, not logits. The
    scores of tokens are those of compute_transition_scores."""
    new, beams = family.requests[0], BeamSearch(3, 3, length_penalty=0.0)
    stops = sorted(new.sampling.stop_token_ids)
    plain = generate_beams(family.model, new.prompt_token_ids, 10, beams, stops)
    words = [plain[0][0][:1], plain[0][0][3:5]]
    sampling = Sampling(
        stop_token_ids=frozenset(stops), repetition_penalty=1.4, min_tokens=6, logprobs=2,
        bad_words=tuple(map(tuple, words)),
    )  # fmt: skip
    right = generate_beams(
        family.model, new.prompt_token_ids, 10, beams, stops,
        repetition_penalty=1.4, bad_words_ids=words, min_new_tokens=6,
    )  # fmt: skip
    assert right != plain
    process = family.process()
    asked = replace(new, max_tokens=10, sampling=sampling, beams=beams)
    answers = process.core.submit(asked)
    while process.state.requests:
        process.next_step()
    assert [generated(answer) for answer in answers] == [tokens for tokens, _ in right]
    for answer, (tokens, score) in zip(answers, right, strict=True):
        assert [one.token_id for one in answer.scores] == tokens
        assert sum(one.logprob for one in answer.scores) == pytest.approx(score, rel=1e-4)
        assert all(len(one.top) == 2 for one in answer.scores)
