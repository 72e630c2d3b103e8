"""transformers' own generation as the bench measures it: the work is right, the times are."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny_models import VOCAB_SIZE, llama
from worker.model import compare
from worker.model.compare import STATIC_BATCH, Request, run_continuous, run_static


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama()).eval()


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Two batches of the yardstick, with lengths that differ."""
    return [
        Request([(7 * n + k) % VOCAB_SIZE for k in range(1 + n % 5)], 1 + n % 4)
        for n in range(STATIC_BATCH + 2)
    ]


def test_static_batches_run_until_their_longest_request_ends(
    model: Any, requests: list[Request]
) -> None:
    """The yardstick's definition: what a short request waits for is its batch."""
    answers = run_static(model, requests).answers
    assert [len(answer.moments) for answer in answers] == [ask.max_new for ask in requests]
    first, second = answers[:STATIC_BATCH], answers[STATIC_BATCH:]
    assert len({answer.end for answer in first}) == len({answer.end for answer in second}) == 1
    assert first[0].end < second[0].moments[0], "batches run one after the other"
    assert all(answer.moments[-1] <= answer.end for answer in answers)


def test_prompts_are_padded_on_the_left_and_eager(
    model: Any, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded on the right, the model would go on from padding: other work, and wrong."""
    seen: list[dict[str, Any]] = []
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda **k: (seen.append(k), generate(**k))[1])
    run_static(model, requests[:3])
    (call,) = seen
    assert call["input_ids"].tolist() == [[0, 0, 0], [0, 7, 8], [14, 15, 16]]
    assert call["attention_mask"].tolist() == [[0, 0, 1], [0, 1, 1], [1, 1, 1]]
    assert call["generation_config"].max_new_tokens == 3
    assert model.config._attn_implementation == "eager"


def test_continuous_batching_gives_every_request_its_tokens(
    model: Any, requests: list[Request]
) -> None:
    """Fewer tokens in the same time would flatter it; more would wrong it."""
    outcome = run_continuous(model, requests)
    assert outcome.notes == []
    for answer, ask in zip(outcome.answers, requests, strict=True):
        assert len(answer.moments) == ask.max_new
        assert all(a <= b for a, b in itertools.pairwise([0.0, *answer.moments, answer.end]))


def test_the_program_answers_a_line_per_system(
    model: Any, requests: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client reads these lines; anything else on standard output would break it."""
    model.save_pretrained(tmp_path / "model")
    workload = tmp_path / "w.jsonl"
    rows = [
        {"id": n, "prompt": ask.prompt, "max_new": ask.max_new} for n, ask in enumerate(requests)
    ]
    workload.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = io.StringIO()
    monkeypatch.setattr("sys.stdin", io.StringIO("static\ncontinuous\nstatic\n"))
    monkeypatch.setattr("sys.stdout", out)
    assert compare.main(["--model", str(tmp_path / "model"), "--workload", str(workload)]) == 0
    ready, *answers = [json.loads(line) for line in out.getvalue().splitlines()]
    assert ready == {"ready": True}
    assert len(answers) == 3
    for answer in answers:
        assert [len(row["deliveries"]) for row in answer["requests"]] == [
            a.max_new for a in requests
        ]


def test_the_systems_are_those_that_the_client_asks_for() -> None:
    """A name that only one side knows fails after minutes of measurement."""
    from client.bench.compare import SYSTEMS

    assert list(SYSTEMS) == list(compare.SYSTEMS)
