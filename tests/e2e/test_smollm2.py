"""The embedded model: golden tokens of transformers' `generate`, and English."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client import Answer, AsyncChairlift, Chairlift
from tests.support.grpcurl import grpcurl, messages
from tests.support.processes import Server

TESTS = Path(__file__).parent.parent
pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with Server(log, wait_seconds=300, deterministic=True) as server:
        yield server


def lines(path: Path) -> list[dict[str, list[int]]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_64_mixed_requests_at_once_give_the_golden_tokens(server: Server) -> None:
    """Serving many changes what the model says. Golden: tests/golden, made by `generate`."""
    workload = lines(TESTS / "workloads" / "mixed.jsonl")
    golden = {row["id"]: row["tokens"] for row in lines(TESTS / "golden" / "mixed_smollm2.jsonl")}

    async def run() -> list[list[int]]:
        async with AsyncChairlift(server.address) as chairlift:
            answers = await asyncio.gather(
                *[
                    chairlift.complete(
                        row["prompt"], temperature=0, max_tokens=row["max_new"], ignore_eos=True
                    )
                    for row in workload
                ]
            )
        return [list(answer.token_ids) for answer in answers]

    together = asyncio.run(run())
    wrong = [
        row["id"] for row, got in zip(workload, together, strict=True) if got != golden[row["id"]]
    ]
    assert wrong == []
    with Chairlift(server.address) as chairlift:
        shortest = sorted(workload, key=lambda row: row["max_new"])[:3]
        for row in shortest:
            alone = chairlift.complete(
                row["prompt"], temperature=0, max_tokens=row["max_new"], ignore_eos=True
            )
            assert list(alone.token_ids) == golden[row["id"]]


def test_grpcurl_streams_a_story(server: Server) -> None:
    """The first thing that an operator types, with the model that everybody has."""
    request = (
        '{"text": "Once upon a time", "sampling": {"max_tokens": 16, "temperature": 0, '
        '"ignore_eos": true}}'
    )
    answers = messages(grpcurl("-d", request, server.address, "chairlift.v1.Inference/Generate"))
    chunks = [answer["chunk"] for answer in answers if "chunk" in answer]
    assert sum(len(chunk["token_ids"]) for chunk in chunks) == 16
    assert len("".join(chunk.get("text", "") for chunk in chunks).split()) >= 8
    assert answers[-1]["complete"]["usage"] == {"prompt_tokens": 4, "completion_tokens": 16}


def test_chat_speaks_english_and_ends_by_itself(server: Server) -> None:
    """A wrong template or EOS: babble, or an answer that never ends."""
    with Chairlift(server.address) as chairlift:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answer = chairlift.complete(question, temperature=0, max_tokens=60)
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
    assert "<|im_end|>" not in answer.text


def test_the_command_generates(server: Server) -> None:
    """`chairlift generate` is the first thing after the demo."""
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "client",
            "generate",
            "--address",
            server.address,
            "--temperature",
            "0",
            "--max-tokens",
            "12",
            "-",
        ],
        input="Once upon a time",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert len(done.stdout.split()) > 4


def test_speculation_changes_no_answer(server: Server) -> None:
    """Drafts that are right are kept where they are not what the model would have said: under a
    seed, a penalty or a grammar; or none is ever right."""
    asked = lines(TESTS / "workloads" / "copy.jsonl")[18]["prompt"]
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7, "seed": 3, "frequency_penalty": 0.2, "logprobs": 1},
        {"temperature": 1, "seed": 3, "regex": "(red, blue, (green|white), ){6}"},
    ]
    with Chairlift(server.address) as chairlift:
        for way in ways:
            plain = chairlift.complete(asked, max_tokens=24, speculate=0, **way)
            fast = chairlift.complete(asked, max_tokens=24, speculate=8, **way)
            assert fast.token_ids == plain.token_ids, way
            assert fast.logprobs == plain.logprobs, way
            assert fast.finish_reason == plain.finish_reason
            assert fast.usage.drafted_tokens >= fast.usage.accepted_tokens > 0, way


def test_beam_searches_find_the_golden_hypotheses(server: Server) -> None:
    """Other hypotheses than transformers', or the same with other scores. Golden: tests/golden,
    made by `generate(num_beams=...)`."""
    searches = lines(TESTS / "golden" / "beams_smollm2.jsonl")
    names = ("max_tokens", "beam_width", "n", "length_penalty", "early_stopping")

    async def run() -> list[Answer]:
        async with AsyncChairlift(server.address) as chairlift:
            return await asyncio.gather(
                *[
                    chairlift.complete(search["prompt"], **{name: search[name] for name in names})
                    for search in searches
                ]
            )

    num_ended = 0
    for search, first in zip(searches, asyncio.run(run()), strict=True):
        answers = [first, *first.siblings]
        found = [list(answer.token_ids) for answer in answers]
        assert found == [golden["tokens"] for golden in search["answers"]]
        scores = [answer.completion.beam_score for answer in answers]
        right = [golden["score"] for golden in search["answers"]]
        assert scores == pytest.approx(right, rel=1e-4)
        num_ended += sum(answer.finish_reason == "stop" for answer in answers)
    assert num_ended


def test_beams_keep_to_a_grammar(server: Server) -> None:
    """Each beam follows the grammar by its own tokens, also when it takes the place of another."""
    options = ["red", "green and blue", "greenish"]
    question = [{"role": "user", "content": "Name a colour."}]
    with Chairlift(server.address) as chairlift:
        first = chairlift.complete(question, choice=options, beam_width=3, n=3, max_tokens=12)
    answers = [first, *first.siblings]
    assert sorted(answer.text for answer in answers) == sorted(options)
    scores = [answer.completion.beam_score for answer in answers]
    assert scores == sorted(scores, reverse=True)
