"""The asyncio client against the same server, where it could differ from the blocking one."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable

import pytest

import client
from client import AsyncChairlift, Chairlift, ChatMessage
from tests.support.fake_server import FakeEngine


@pytest.fixture
async def chairlift(address: str) -> AsyncIterator[AsyncChairlift]:
    async with AsyncChairlift(address) as chairlift:
        yield chairlift


async def gone(engine: FakeEngine) -> str:
    return await asyncio.to_thread(engine.gone.get, True, 10)


def public(kind: type) -> dict[str, Callable[..., object]]:
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("_") and callable(value)
    }


@pytest.mark.parametrize(
    ("sync", "twin"),
    [(Chairlift, AsyncChairlift), (client.TokenStream, client.AsyncTokenStream)],
)
def test_the_twins_have_the_same_calls(sync: type, twin: type) -> None:
    """Whoever knows one client knows the other; a call added to one only would break that."""
    assert public(sync).keys() == public(twin).keys()
    for name, call in public(sync).items():
        ours = inspect.signature(public(twin)[name]).parameters
        assert list(ours.values()) == list(inspect.signature(call).parameters.values()), name


async def test_many_streams_side_by_side(chairlift: AsyncChairlift) -> None:
    """The reason to use asyncio at all."""
    streams = [chairlift.generate(f"count {number}") for number in range(5)]
    texts = await asyncio.gather(*(stream.text() for stream in streams))
    assert texts == ["".join(f"w{i} " for i in range(number)) for number in range(5)]
    assert [stream.finish_reason for stream in streams] == ["stop"] * 5
    usage = [stream.usage.completion_tokens for stream in streams if stream.usage]
    assert usage == [0, 1, 2, 3, 4]


async def test_siblings_and_unary(chairlift: AsyncChairlift) -> None:
    """`answers` and `complete` share the transcript with the blocking client."""
    stream = chairlift.generate("count 1", n=2)
    assert [answer.text for answer in await stream.answers()] == ["w0 ", "(1)w0 "]
    assert stream.started is not None
    assert (await chairlift.complete([ChatMessage("user", "Hi")])).text == "you said: Hi"
    whole = await chairlift.complete("count 1", n=2)
    assert (whole.text, [sibling.text for sibling in whole.siblings]) == ("w0 ", ["(1)w0 "])


@pytest.mark.parametrize("how", ["cancel", "with", "break", "close", "task"])
async def test_leaving_early_cancels_the_request(
    address: str, engine: FakeEngine, how: str
) -> None:
    """A request nobody reads would hold its blocks until it had run to its end."""
    chairlift = AsyncChairlift(address)
    started = asyncio.Event()

    async def read() -> None:
        async for _ in chairlift.generate("forever", request_id="left"):
            started.set()

    if how == "break":
        async for _ in chairlift.generate("forever", request_id="left"):
            break
    elif how == "with":
        async with chairlift.generate("forever", request_id="left") as stream:
            await anext(stream)
    elif how == "task":
        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        stream = chairlift.generate("forever", request_id="left")
        await anext(stream)
        if how == "cancel":
            stream.cancel()
        else:
            await chairlift.close()
    assert await gone(engine) == "left"
    await chairlift.close()


async def test_a_task_cancelled_before_anything_came(
    chairlift: AsyncChairlift, engine: FakeEngine
) -> None:
    """A request that still waits in the queue must go too."""
    stream = chairlift.generate("silent", request_id="queued")
    task = asyncio.create_task(stream.text())
    await asyncio.to_thread(engine.arrived.get, True, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await gone(engine) == "queued"


async def test_cancel_ends_the_loop(chairlift: AsyncChairlift) -> None:
    """Our own cancel is no error, and must not look like the task's cancellation."""
    stream = chairlift.generate("forever")
    seen = 0
    async for _ in stream:
        seen += 1
        stream.cancel()
    assert seen >= 1
    assert stream.finish_reason is None


async def test_errors_and_deadlines(chairlift: AsyncChairlift, engine: FakeEngine) -> None:
    """The same exceptions as of the blocking client, from streams and from small calls."""
    with pytest.raises(client.InvalidRequest, match=r"^n is 0; allowed: >= 1$"):
        await chairlift.generate("fail INVALID_ARGUMENT n is 0; allowed: >= 1").text()
    with pytest.raises(client.DeadlineExceeded):
        await chairlift.generate("silent", timeout=0.3).text()
    with pytest.raises(client.NotFound, match="'other'"):
        await chairlift.get_request("other")


async def test_nobody_there(nobody: str) -> None:
    """As in the blocking client: address and way out."""
    async with AsyncChairlift(nobody, retries=0) as chairlift:
        with pytest.raises(client.Unreachable, match=nobody):
            await chairlift.generate("count 1").text()
        assert not await chairlift.is_ready()
        with pytest.raises(client.DeadlineExceeded, match=r"0.3 s \(unreachable\)"):
            await chairlift.wait_ready(timeout=0.3)


async def test_small_calls(chairlift: AsyncChairlift, engine: FakeEngine) -> None:
    """Each unary call unwraps its answer into what its name promises."""
    assert await chairlift.tokenize("ab") == [97, 98]
    assert await chairlift.detokenize([97, 98]) == "ab"
    assert await chairlift.abort("a", "b") == ["a"]
    assert (await chairlift.model_info()).model == "fake-model"
    assert (await chairlift.list_requests()).total == 2
    assert (await chairlift.get_cache()).chunks_free == 75
    assert await chairlift.flush_cache() == 40
    assert [summary.step_id async for summary in await chairlift.watch_steps()] == [0, 1]
    engine.is_ready = False
    seen: list[str] = []

    def note(waiting_for: str) -> None:
        seen.append(waiting_for)
        engine.is_ready = True

    await chairlift.wait_ready(timeout=20, on_change=note)
    assert seen == ["worker: loading"]
    assert await chairlift.is_ready()
