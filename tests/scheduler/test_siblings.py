"""n > 1 through Generate: indexes, ends, the unary shape, and aborts of the whole family."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from protos import inference_pb2 as pb
from scheduler_svc.core.request import FinishReason
from scheduler_svc.errors import RequestFailed
from tests.support.calls import generate, ids, kinds, read_all, started, status_of, until
from tests.support.edge import Edge
from tests.support.fake_engine import FakeEngine

THREE = pb.SamplingParams(n=3, seed=5)


def texts(responses: list[pb.GenerateResponse]) -> list[str]:
    """Of the siblings 0 to 2."""
    return [
        "".join(response.chunk.text for response in responses if response.index == index)
        for index in range(3)
    ]


def all_speak(engine: FakeEngine, submission: Any) -> None:
    """Each sibling says a word and ends in a way of its own."""
    request_id = submission.new.request_id
    for index, word in enumerate(["né", "ánd", "x"]):
        engine.speak(request_id, ids(word), index)
    engine.end(request_id, FinishReason.LENGTH, 1)
    engine.speak(request_id, ids("STOP"), 0)
    engine.end(request_id, FinishReason.LENGTH, 2)


async def test_siblings_stream_under_their_index(edge: Edge) -> None:
    """Started once, every delta with its sibling, one Complete each, and then the end."""
    edge.engine.cached_tokens = 3
    call = generate(edge, request_id="r", sampling=THREE)
    assert (await started(call)).seed == 5
    edge.engine.speak("r", ids("né")[:2], 2)  # half of the é
    first = await call.read()
    assert (first.index, first.chunk.text) == (2, "n")
    edge.engine.speak("r", ids("a"), 0)
    edge.engine.speak("r", ids("é")[1:], 2)
    edge.engine.end("r", FinishReason.LENGTH, 2)
    edge.engine.speak("r", ids("b"), 1)
    edge.engine.speak("r", ids("c"), 0)
    edge.engine.end("r")
    rest = await read_all(call)
    assert texts([first, *rest]) == ["ac", "b", "né"]
    ends = {response.index: response for response in rest if response.HasField("complete")}
    assert sorted(ends) == [0, 1, 2]
    assert [ends[index].complete.usage.completion_tokens for index in range(3)] == [2, 1, 3]
    assert {ends[index].complete.usage.cached_tokens for index in range(3)} == {3}
    for index, end in ends.items():
        assert [response for response in rest if response.index == index][-1] == end
    assert "started" not in kinds(rest)
    assert edge.engine.aborted == []


async def test_the_unary_shape_has_a_chunk_and_a_complete_each(edge: Edge) -> None:
    """stream = false with n = 3 gives one answer, or the same texts as the stream in bits."""
    edge.engine.script = all_speak
    sampling = pb.SamplingParams(n=3, stop=["STOP"])
    whole = await read_all(generate(edge, sampling=sampling, stream=False))
    assert kinds(whole) == ["started", *["chunk", "complete"] * 3]
    assert [response.index for response in whole[1:]] == [0, 0, 1, 1, 2, 2]
    assert texts(whole) == ["né", "ánd", "x"]
    assert [response.complete.stop_string for response in whole[2::2]] == ["STOP", "", ""]
    streamed = await read_all(generate(edge, sampling=sampling))
    assert texts(streamed) == texts(whole)


async def test_a_slow_reader_gets_every_siblings_own_text(edge: Edge) -> None:
    """What piles up while nobody reads must neither mix siblings nor lose any text."""
    call = generate(edge, request_id="r", sampling=THREE)
    await started(call)
    for number in range(10):
        for index in (2, 0, 1):
            edge.engine.speak("r", ids(f"{index}:{number} "), index)
    edge.engine.end("r")
    responses = await read_all(call)
    assert texts(responses) == [
        "".join(f"{index}:{number} " for number in range(10)) for index in range(3)
    ]
    assert kinds(responses[-1:]) == ["complete"]


async def test_a_failure_takes_all_siblings(edge: Edge) -> None:
    """One status ends the call, after the Complete of the sibling that had ended before."""
    call = generate(edge, request_id="r", sampling=THREE)
    await started(call)
    edge.engine.speak("r", ids("a"), 1)
    edge.engine.end("r", FinishReason.LENGTH, 1)
    edge.engine.fail("r", RequestFailed("request r: its step made the worker fail"))
    assert (await call.read()).chunk.text == "a"
    end = await call.read()
    assert (end.index, end.complete.finish_reason) == (1, "length")
    code, details = await status_of(call)
    assert (code, "request r" in details) == (grpc.StatusCode.INTERNAL, True)


@pytest.mark.parametrize("num_ended", [0, 1, 2])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_what_still_lives(
    edge: Edge, num_ended: int, stream: bool
) -> None:
    """The end of one sibling must not look like the end of the request."""
    call = generate(edge, request_id="r", sampling=THREE, stream=stream)
    await started(call)
    for index in range(num_ended):
        edge.engine.end("r", FinishReason.LENGTH, index)
    call.cancel()
    await until(lambda: edge.engine.aborted == ["r"])
    await until(lambda: edge.server.num_live == 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_abort_ends_every_sibling(edge: Edge, stream: bool) -> None:
    """Siblings that ended before keep their reason; the others say abort, each for itself."""
    call = generate(edge, request_id="r", sampling=THREE, stream=stream)
    await started(call)
    edge.engine.speak("r", ids("ab"), 0)
    edge.engine.end("r", FinishReason.LENGTH, 2)
    request = pb.AbortRequest(request_ids=["r"])
    assert list((await edge.inference.Abort(request)).aborted) == ["r"]
    responses = await read_all(call)
    ends = {r.index: r.complete.finish_reason for r in responses if r.HasField("complete")}
    assert ends == {0: "abort", 1: "abort", 2: "length"}
    assert texts(responses) == ["ab", "", ""]
    await until(lambda: edge.server.num_live == 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_abort_while_the_model_loads(unready_edge: Edge, stream: bool) -> None:
    """The engine knows none of the siblings, their client waits for all of them."""
    call = generate(unready_edge, request_id="r", sampling=THREE, stream=stream)
    await until(lambda: unready_edge.server.num_live == 1)
    await unready_edge.inference.Abort(pb.AbortRequest(request_ids=["r"]))
    responses = await read_all(call)
    each = ["complete"] if stream else ["chunk", "complete"]
    assert kinds(responses) == ["started", *each * 3]
    assert sorted(r.index for r in responses if r.HasField("complete")) == [0, 1, 2]


@pytest.mark.parametrize("n", [0, -1, 65, 2**31 - 1])
async def test_a_wrong_n_is_named_at_once(unready_edge: Edge, n: int) -> None:
    """Too many would never find a place in one step; no worker is needed to say so."""
    code, details = await status_of(generate(unready_edge, sampling=pb.SamplingParams(n=n)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details == f"sampling.n is {n}; allowed: 1 to 64 (max_requests_per_batch)"
