"""`map`: many prompts, their answers in order, errors one by one, and bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import client
from client import Answer, AsyncChairlift, Chairlift, ChairliftError, MapProgress
from tests.support.fake_server import FakeEngine

PROMPTS: list[Any] = [
    "count 2",
    "fail INTERNAL no luck",
    5,  # no prompt at all
    "count 0",
    [{"role": "user", "content": "Hi"}],
    "count 1",
]
TEXTS = ["w0 w1 ", "no luck", "prompt is 5; allowed", "", "you said: Hi", "w0 "]


def shown(result: Answer | ChairliftError) -> str:
    return result.text if isinstance(result, Answer) else str(result).partition(":")[0]


def test_answers_come_in_order(chairlift: Chairlift) -> None:
    """Whoever pairs them with the prompts must not pair the wrong ones."""
    results = list(chairlift.map(iter(PROMPTS), concurrency=3, temperature=0))
    assert [shown(result) for result in results] == TEXTS
    kinds = [type(result) for result in results]
    assert kinds[1:3] == [client.ServerError, client.InvalidRequest]
    assert list(chairlift.map([])) == []


async def test_answers_come_in_order_in_asyncio(address: str) -> None:
    """The same, in the other form."""
    async with AsyncChairlift(address) as chairlift:
        results = [result async for result in chairlift.map(iter(PROMPTS), concurrency=3)]
        assert [shown(result) for result in results] == TEXTS
        assert [result async for result in chairlift.map([])] == []


def test_options_reach_every_request(chairlift: Chairlift, engine: FakeEngine) -> None:
    """And several answers per prompt stay together."""
    (answer,) = chairlift.map(["count 1"], n=2, priority=3, cache_salt="s", max_tokens=4)
    assert isinstance(answer, Answer)
    assert [sibling.text for sibling in answer.siblings] == ["(1)w0 "]
    (sent,) = engine.requests
    assert (sent.priority, sent.cache_salt, sent.sampling.max_tokens) == (3, "s", 4)
    assert not sent.stream


def test_wrong_arguments_are_said_before_anything_runs(
    chairlift: Chairlift, engine: FakeEngine
) -> None:
    """Not once per prompt, and not when the first answer is read."""
    with pytest.raises(TypeError, match="unknown sampling option 'temprature'"):
        chairlift.map(["a"], temprature=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="max_tokens is 4294967296"):
        chairlift.map(["a"], max_tokens=1 << 32)
    with pytest.raises(ValueError, match="concurrency is 0; allowed: at least 1"):
        chairlift.map(["a"], concurrency=0)
    assert engine.requests == []


def test_progress(chairlift: Chairlift) -> None:
    """Each prompt once, in the reader's thread, with what a progress bar shows."""
    seen: list[MapProgress] = []
    list(chairlift.map(PROMPTS, concurrency=2, on_progress=seen.append))
    assert [progress.finished for progress in seen] == [1, 2, 3, 4, 5, 6]
    assert seen[-1] == MapProgress(finished=6, failed=2, total=6, completion_tokens=5)
    seen.clear()
    list(chairlift.map(iter(PROMPTS[:1]), on_progress=seen.append))
    assert seen == [MapProgress(finished=1, failed=0, total=None, completion_tokens=2)]


async def test_progress_in_asyncio(address: str) -> None:
    """The same, in the other form."""
    seen: list[MapProgress] = []
    async with AsyncChairlift(address) as chairlift:
        async for _ in chairlift.map(PROMPTS, concurrency=2, on_progress=seen.append):
            pass
    assert [progress.finished for progress in seen] == [1, 2, 3, 4, 5, 6]
    assert seen[-1] == MapProgress(finished=6, failed=2, total=6, completion_tokens=5)


def counted(drawn: list[int]) -> Iterator[str]:
    """Prompts without end; `drawn` counts them."""
    for number in itertools.count():
        drawn.append(number)
        yield "count 1"


def test_an_endless_generator_is_drawn_as_answers_are_read(
    chairlift: Chairlift, engine: FakeEngine
) -> None:
    """Millions of prompts must not be held, nor sent, before anybody reads their answers."""
    drawn: list[int] = []
    answers = chairlift.map(counted(drawn), concurrency=4)
    assert drawn == []
    for _ in range(30):
        assert isinstance(next(answers), Answer)
    assert len(drawn) <= 30 + 4 * 4
    answers.close()  # type: ignore[attr-defined]
    assert len(engine.requests) <= len(drawn)


async def test_an_endless_generator_in_asyncio(address: str) -> None:
    """The same, in the other form."""
    drawn: list[int] = []
    async with AsyncChairlift(address) as chairlift:
        answers = chairlift.map(counted(drawn), concurrency=4)
        for _ in range(30):
            assert isinstance(await anext(answers), Answer)
        assert len(drawn) <= 30 + 4 * 4
        await answers.aclose()  # type: ignore[attr-defined]


def failing() -> Iterator[str]:
    yield "count 1"
    raise OSError("the file broke")


def test_prompts_that_break(chairlift: Chairlift) -> None:
    """What was answered before is not lost, and the error is not swallowed."""
    answers = chairlift.map(failing())
    assert shown(next(answers)) == "w0 "
    with pytest.raises(OSError, match="the file broke"):
        next(answers)


async def test_prompts_that_break_in_asyncio(address: str) -> None:
    """The same, in the other form."""
    async with AsyncChairlift(address) as chairlift:
        answers = chairlift.map(failing())
        assert shown(await anext(answers)) == "w0 "
        with pytest.raises(OSError, match="the file broke"):
            await anext(answers)


def test_leaving_early_cancels_what_runs(chairlift: Chairlift, engine: FakeEngine) -> None:
    """Requests that nobody reads would run to their ends."""
    answers = chairlift.map(["count 1", "silent", "silent"], concurrency=3)
    next(answers)
    for _ in range(3):
        engine.arrived.get(timeout=10)
    answers.close()  # type: ignore[attr-defined]
    for _ in range(2):
        assert engine.gone.get(timeout=10)


async def test_leaving_early_in_asyncio(address: str, engine: FakeEngine) -> None:
    """The same, in the other form."""
    async with AsyncChairlift(address) as chairlift:
        answers: AsyncIterator[Any] = chairlift.map(["count 1", "silent", "silent"])
        await anext(answers)
        await answers.aclose()  # type: ignore[attr-defined]
        results = {request.text for request in engine.requests}
        assert "count 1" in results
        for _ in range(len(engine.requests) - 1):
            assert engine.gone.get(timeout=10)


def test_a_loss_is_no_error_of_an_item(
    chairlift: Chairlift, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's restart in the middle of a long run costs nothing but time."""
    monkeypatch.setattr("client.resuming.FIRST_PAUSE_SECONDS", 0.001)
    engine.losses = [0, 1, 2, 1, 0]
    results = chairlift.map(["count 2"] * 5, concurrency=2)
    assert [shown(result) for result in results] == ["w0 w1 "] * 5
