"""A request ends with its client, or when somebody asks for it, in every state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from protos import inference_pb2 as pb
from scheduler_svc.settings.config import Config
from tests.support.calls import (
    delta,
    generate,
    ids,
    kinds,
    read_all,
    says,
    started,
    status_of,
    text_of,
    until,
)
from tests.support.edge import Edge, stop


@pytest.fixture(autouse=True)
async def nothing_left_behind() -> AsyncIterator[None]:
    """A task that outlives its test belongs to a handler that was forgotten."""
    yield
    names = {task.get_coro().__qualname__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]
    assert not {name for name in names if "Service." in name}


# A request ends with its client, in every state


async def cancelled(edge: Edge, call: Any) -> None:
    call.cancel()


async def channel_closed(edge: Edge, call: Any) -> None:
    await edge.channel.close()


WAYS = pytest.mark.parametrize("leave", [cancelled, channel_closed])


@WAYS
@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_an_abort(
    edge: Edge, leave: Any, num_tokens: int, stream: bool
) -> None:
    """Tokens for nobody take the place of tokens for somebody."""
    call = generate(edge, request_id="r", stream=stream)
    await started(call)
    edge.engine.speak("r", ids("abc")[:num_tokens])
    await leave(edge, call)
    await until(lambda: edge.engine.aborted == ["r"])
    await until(lambda: edge.server.num_live == 0)


@WAYS
async def test_leaving_while_the_model_loads(unready_edge: Edge, leave: Any) -> None:
    """Such a request must not come to life when the worker is ready."""
    call = generate(unready_edge, request_id="r")
    await until(lambda: unready_edge.server.num_live == 1)
    await leave(unready_edge, call)
    await until(lambda: unready_edge.server.num_live == 0)
    unready_edge.engine.become_ready()
    await unready_edge.server.served.wait_until_ready_is(True)
    assert unready_edge.engine.submitted == []


async def test_a_client_that_never_reads_is_an_abort_when_it_leaves(
    edge: Edge, caplog: pytest.LogCaptureFixture
) -> None:
    """The handler then sits in a write, where the end shows as another exception."""
    call = generate(edge, request_id="r", sampling=pb.SamplingParams())
    await started(call)
    big = "x" * 100_000
    for _ in range(100):
        edge.engine.deliver([delta("r", big)])
        await asyncio.sleep(0)
    call.cancel()
    await until(lambda: edge.engine.aborted == ["r"])
    await until(lambda: edge.server.num_live == 0)
    assert "Traceback" not in caplog.text


async def test_a_deadline_is_an_abort(edge: Edge) -> None:
    """The client has stopped listening; grpc told it so itself."""
    call = edge.inference.Generate(pb.GenerateRequest(request_id="r", text="hello"), timeout=0.6)
    await started(call)
    code, _ = await status_of(call)
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: edge.engine.aborted == ["r"])


async def test_the_servers_own_time_limit(make_edge: Any, config: Config) -> None:
    """request_timeout bounds clients that set no deadline."""
    edge = await make_edge(replace(config, request_timeout=0.6))
    call = generate(edge, request_id="r")
    await started(call)
    code, details = await status_of(call)
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert "request_timeout" in details
    assert edge.engine.aborted == ["r"]
    await stop(edge)


async def test_ending_is_no_abort(edge: Edge) -> None:
    """An abort after the end could hit the next request of the same id."""
    edge.engine.script = says("x")
    await read_all(generate(edge, request_id="r"))
    await until(lambda: edge.server.num_live == 0)
    edge.engine.script = None
    assert edge.engine.aborted == []


# Abort, asked for


async def test_abort_ends_streams_with_a_reason(edge: Edge) -> None:
    """The stream's own client learns that it was no mistake; unknown ids are ignored."""
    call = generate(edge, request_id="r")
    await started(call)
    edge.engine.speak("r", ids("ab"))
    request = pb.AbortRequest(request_ids=["unknown", "r", "r"])
    assert list((await edge.inference.Abort(request)).aborted) == ["r"]
    rest = await read_all(call)
    assert (text_of(rest), rest[-1].complete.finish_reason) == ("ab", "abort")
    assert rest[-1].complete.usage.completion_tokens == 2
    assert list((await edge.inference.Abort(request)).aborted) == []


async def test_abort_of_a_unary_answer_keeps_its_shape(edge: Edge) -> None:
    """Whoever waits for one chunk gets one, with what there was."""
    call = generate(edge, request_id="r", stream=False)
    await started(call)
    await edge.inference.Abort(pb.AbortRequest(request_ids=["r"]))
    assert kinds(await read_all(call)) == ["chunk", "complete"]


async def test_abort_while_the_model_loads(unready_edge: Edge) -> None:
    """The engine does not know the request yet, its client waits all the same."""
    call = generate(unready_edge, request_id="r")
    await until(lambda: unready_edge.server.num_live == 1)
    aborted = await unready_edge.inference.Abort(pb.AbortRequest(request_ids=["r"]))
    assert list(aborted.aborted) == ["r"]
    responses = await read_all(call)
    assert kinds(responses) == ["started", "complete"]
    assert responses[-1].complete.finish_reason == "abort"
    unready_edge.engine.become_ready()
    await unready_edge.server.served.wait_until_ready_is(True)
    assert unready_edge.engine.submitted == []
