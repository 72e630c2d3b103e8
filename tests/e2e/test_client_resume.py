"""A scheduler that is killed in the middle of its answers: their streams end whole."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client import Answer, AsyncChairlift, Chairlift
from tests.support.services import Services

READY_SECONDS = 60.0
RETRIES = 60  # a scheduler that imports on a busy machine
PROMPTS: dict[str, Any] = {
    "greedy": "Once",
    "penalties": [1, 2, 3],
    "stop": "Once",
    "siblings": "Twice",
    "chat": [{"role": "user", "content": "Hello"}],
    "grammar": "A list:",
}
LONG: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True}
DRAWN: dict[str, Any] = {**LONG, "temperature": 1.2}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {**LONG, "temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
    "penalties": {
        **LONG,
        "seed": 11,
        "temperature": 0.8,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "logit_bias": {65: 3.0},
        "logprobs": 0,
    },
    "stop": {**LONG, "seed": 5, "temperature": 1.5, "top_k": 40},
    "siblings": {**LONG, "seed": 9, "n": 3},
    "chat": {**LONG, "seed": 3, "min_tokens": 50, "speculate": 4},
    "grammar": {
        "max_tokens": 120,
        "seed": 4,
        "json_schema": {"type": "array", "items": {"type": "string"}, "minItems": 100},
    },
}


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("services")
    services = Services(folder, tiny_model, "--num-blocks", "600", "--deterministic", "true")
    with Chairlift(services.address) as chairlift:
        try:
            chairlift.wait_ready(READY_SECONDS)
        except Exception as error:
            raise AssertionError(f"{error}\n{services.log.read_text()}") from error
    yield services
    services.stop()


@pytest.fixture(scope="module")
def undisturbed(services: Services) -> dict[str, list[Answer]]:
    """The answers, and a stop string for the one that is to end by it."""
    with Chairlift(services.address) as chairlift:
        streams = {name: chairlift.generate(PROMPTS[name], **OPTIONS[name]) for name in PROMPTS}
        answers = {name: stream.answers() for name, stream in streams.items()}
        text = answers["stop"][0].text
        begin = next(
            place for place in range(70, len(text)) if text.find(text[place : place + 4]) == place
        )
        OPTIONS["stop"]["stop"] = [text[begin : begin + 4], "never said"]
        answers["stop"] = chairlift.generate(PROMPTS["stop"], **OPTIONS["stop"]).answers()
    assert answers["stop"][0].finish_reason == "stop"
    assert 0 < len(answers["stop"][0].text) < len(text)
    return answers


def compared(answers: list[Answer]) -> dict[str, Any]:
    """All but ids, times, and what the prefix cache happened to hold."""
    return {
        f"{what} of {answer.completion.index}": value
        for answer in answers
        for what, value in {
            "text": answer.text,
            "token_ids": answer.token_ids,
            "logprobs": answer.logprobs,
            "prompt_logprobs": answer.prompt_logprobs,
            "end": (answer.finish_reason, answer.completion.stop_string),
            "usage": (answer.usage.prompt_tokens, answer.usage.completion_tokens),
        }.items()
    }


def check_equal(name: str, answers: list[Answer], undisturbed: list[Answer]) -> None:
    """Names what differs, and shows where."""
    ours, theirs = compared(answers), compared(undisturbed)
    assert ours.keys() == theirs.keys(), name
    for what, value in ours.items():
        assert value == theirs[what], f"{what}, {name}"


def watched(chairlift: Any) -> list[Any]:
    """The requests that a client sends from now on."""
    requests: list[Any] = []
    start = chairlift._start

    def note(request: Any, timeout: float | None) -> Any:
        requests.append(request)
        return start(request, timeout)

    chairlift._start = note
    return requests


def check_resumed(requests: list[Any]) -> None:
    """Streams were lost after they had begun and before they were whole."""
    midway = {
        (str(request), request.resume.index)
        for request in requests
        if 0 < len(request.resume.output_token_ids) < LONG["max_tokens"]
    }
    assert len(midway) >= 3, "the answers were whole before the scheduler was killed"


def test_streams_outlive_their_scheduler(
    services: Services, undisturbed: dict[str, list[Answer]]
) -> None:
    """Greedy and seeded, with penalties, a stop string, a grammar, log probabilities, and for each
    sibling: the same as if nothing had happened. Without a seed: as with the one in `started`."""
    with Chairlift(services.address, retries=RETRIES) as chairlift:
        requests = watched(chairlift)
        streams = {name: chairlift.generate(PROMPTS[name], **OPTIONS[name]) for name in PROMPTS}
        shown = {name: [next(stream)] for name, stream in streams.items()}
        drawn = chairlift.generate("Once", request_id="mine", **DRAWN)
        next(drawn)
        services.restart_scheduler(signal.SIGKILL)
        for name, stream in streams.items():
            shown[name] += stream
            check_equal(name, stream.answers(), undisturbed[name])
            for answer in undisturbed[name]:
                mine = [delta for delta in shown[name] if delta.index == answer.completion.index]
                assert "".join(delta.text for delta in mine) == answer.text, name
        check_resumed(requests)
        (answer,) = drawn.answers()
        assert answer.started.request_id == "mine"
        again = chairlift.complete("Once", seed=answer.started.seed, **DRAWN)
        check_equal("drawn", [answer], [again])


async def test_streams_of_asyncio_outlive_it_too(
    services: Services, undisturbed: dict[str, list[Answer]]
) -> None:
    """The same, all side by side, and with a whole answer in one message."""
    async with AsyncChairlift(services.address, retries=RETRIES) as chairlift:
        whole = asyncio.ensure_future(chairlift.complete(PROMPTS["greedy"], **OPTIONS["greedy"]))
        requests = watched(chairlift)
        streams = {name: chairlift.generate(PROMPTS[name], **OPTIONS[name]) for name in PROMPTS}
        for stream in streams.values():
            await anext(stream)
        await asyncio.to_thread(services.restart_scheduler, signal.SIGKILL)
        answers = await asyncio.gather(*(stream.answers() for stream in streams.values()))
        for name, answer in zip(streams, answers, strict=True):
            check_equal(name, answer, undisturbed[name])
        check_resumed(requests)
        check_equal("whole", [await whole], undisturbed["greedy"])
