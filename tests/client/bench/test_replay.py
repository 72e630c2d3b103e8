"""The replay over gRPC, against the fake server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from client import Unreachable
from client.aio import AsyncChairlift
from client.bench.arrivals import parse_arrivals
from client.bench.records import Run
from client.bench.replay import replay
from client.bench.workload import WorkloadRequest
from protos import inference_pb2
from tests.support.fake_server import FakeEngine, fail, start


class CountingEngine(FakeEngine):
    """Gives as many tokens as are asked for, in two messages; each request is one step.

    A prompt that begins with 13 fails.
    """

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        if request.tokens.ids[0] == 13:
            fail(context, "INVALID_ARGUMENT thirteen")
        yield inference_pb2.GenerateResponse(started=inference_pb2.Started(seed=1))
        wanted = list(range(request.sampling.max_tokens))
        for tokens in (wanted[:1], wanted[1:]):
            yield inference_pb2.GenerateResponse(chunk=inference_pb2.Chunk(token_ids=tokens))
        yield inference_pb2.GenerateResponse(
            complete=inference_pb2.Complete(
                finish_reason="length",
                usage=inference_pb2.Usage(cached_tokens=2, drafted_tokens=4, accepted_tokens=3),
                timing=inference_pb2.Timing(
                    queued_seconds=0.25, prefill_seconds=0.5, preemptions=1
                ),
            )
        )

    def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> inference_pb2.GetModelInfoResponse:
        return inference_pb2.GetModelInfoResponse(model="fake-model", vocab_size=50)


@pytest.fixture
def engine() -> FakeEngine:
    return CountingEngine()


ASKS = [
    WorkloadRequest("a", (1, 2, 3), 4),
    WorkloadRequest("b", (4,), 2, priority=5),
    WorkloadRequest("c", (5, 6), 1),
]


def run(
    address: str, asks: list[WorkloadRequest], times: list[float]
) -> tuple[Run, list[tuple[int, bool]]]:
    progress: list[tuple[int, bool]] = []

    async def go() -> Run:
        async with AsyncChairlift(address) as chairlift:
            return await replay(chairlift, asks, times, lambda *news: progress.append(news))

    return asyncio.run(go()), progress


def test_every_request_is_sent_as_it_is_and_its_tokens_are_counted(
    address: str, engine: FakeEngine
) -> None:
    """A request that is sent with other settings is other work than the compared system does."""
    measured, progress = run(address, ASKS, [0.0] * 3)
    sent = sorted(engine.requests, key=lambda request: list(request.tokens.ids))
    assert [list(request.tokens.ids) for request in sent] == [[1, 2, 3], [4], [5, 6]]
    assert [request.sampling.max_tokens for request in sent] == [4, 2, 1]
    assert [request.priority for request in sent] == [0, 5, 0]
    for request in sent:
        assert request.sampling.ignore_eos
        assert request.sampling.HasField("temperature")
        assert request.sampling.temperature == 0.0
        assert not request.sampling.HasField("speculate")
    assert [record.output_tokens for record in measured.requests] == [4, 2, 1]
    assert all(record.is_complete for record in measured.requests)
    assert sum(tokens for tokens, _ in progress) == 7
    assert sum(has_ended for _, has_ended in progress) == 3


def test_times_are_in_order_and_the_servers_are_kept(address: str) -> None:
    """The timeline is drawn from these."""
    measured, _ = run(address, ASKS, [0.0] * 3)
    for record in measured.requests:
        assert 0 <= record.sent <= record.deliveries[0][0] <= record.end
        assert (record.queued_seconds, record.prefill_seconds) == (0.25, 0.5)
        assert (record.preemptions, record.cached_tokens) == (1, 2)
        assert (record.drafted_tokens, record.accepted_tokens) == (4, 3)


def test_requests_are_sent_when_they_are_due(address: str) -> None:
    """Sent too early they would all be a burst."""
    times = parse_arrivals("bursts:1/0.05").times(3, seed=0)
    measured, _ = run(address, ASKS, times)
    assert [record.due for record in measured.requests] == times
    assert all(record.sent >= record.due for record in measured.requests)


def test_requests_of_one_burst_are_sent_in_their_order(address: str, engine: FakeEngine) -> None:
    """fifo serves them in the order in which they come: two runs must not differ in it."""
    asks = [WorkloadRequest(str(n), (n + 20,), 1) for n in range(30)]
    measured, _ = run(address, asks, [0.01] * 30)
    sent = [record.sent for record in measured.requests]
    assert sent == sorted(sent)


def test_gathering_sends_a_request_ahead_that_is_not_measured(
    address: str, engine: FakeEngine
) -> None:
    """Sent behind the others it would gather nobody; measured it would be work nobody asked for."""

    async def go() -> Run:
        async with AsyncChairlift(address) as chairlift:
            return await replay(
                chairlift, ASKS, [0.0] * 3, lambda tokens, ended: None, gathers=True
            )

    measured = asyncio.run(go())
    assert list(engine.requests[0].tokens.ids) == [1]
    assert len(engine.requests) == 4
    assert [record.id for record in measured.requests] == ["a", "b", "c"]


def test_a_request_that_fails_is_a_result(address: str) -> None:
    """One refused request must not lose an hour of measurement, nor pass unseen."""
    measured, progress = run(address, [*ASKS, WorkloadRequest("bad", (13,), 2)], [0.0] * 4)
    assert [record.is_complete for record in measured.requests] == [True, True, True, False]
    assert measured.requests[3].error == "INVALID_ARGUMENT: thirteen"
    assert sum(has_ended for _, has_ended in progress) == 4
    assert measured.notes[-1].startswith("1 of 4 requests failed, the first one with: INVALID")


def test_steps_are_put_on_the_clients_clock(address: str) -> None:
    """The server's clock began at another time; the pictures share one axis."""
    measured, _ = run(address, ASKS, [0.0] * 3)
    first, second = measured.steps
    assert second.start - first.start == pytest.approx(1.0)
    assert abs(second.end) < 5.0, "the last summary came at about the run's start"
    assert (first.chunks_used, first.chunks_total, first.rows) == (75, 100, 3)
    assert "1 steps were missed by the watcher" in measured.notes


class BlindEngine(CountingEngine):
    def WatchSteps(self, request: Any, context: grpc.ServicerContext) -> Any:
        fail(context, "UNIMPLEMENTED not in this version")


def test_a_server_that_does_not_tell_its_steps_is_measured_all_the_same() -> None:
    """An older server, or one behind a proxy that lets no Admin call through."""
    server, address = start(BlindEngine())
    measured, _ = run(address, ASKS, [0.0] * 3)
    server.stop(grace=None).wait()
    assert measured.steps == []
    assert measured.notes == ["the server does not report its steps: not in this version"]
    assert all(record.is_complete for record in measured.requests)


def test_a_server_that_is_not_there_is_an_error(nobody: str) -> None:
    """Sixty-four failed requests would say less."""
    with pytest.raises(Unreachable):
        run(nobody, ASKS, [0.0] * 3)
