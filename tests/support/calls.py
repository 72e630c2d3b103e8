"""Calling the API in tests: short names for what nearly every test does."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from protos import admin_pb2, admin_pb2_grpc
from protos import inference_pb2 as pb
from scheduler_svc.engine.events import Delta
from tests.support.edge import Edge
from tests.support.fake_engine import FakeEngine
from tests.support.small_tokenizers import byte_level

SECONDS = 10.0  # more than anything here takes
BYTES = byte_level()
END = BYTES.token_to_id("<|im_end|>")


def ids(text: str) -> list[int]:
    return list(BYTES.encode(text).ids)


def generate(edge: Edge, **fields: Any) -> Any:
    fields.setdefault("text", "hello")
    return edge.inference.Generate(pb.GenerateRequest(**fields), timeout=SECONDS)


async def read_all(call: Any) -> list[pb.GenerateResponse]:
    responses: list[pb.GenerateResponse] = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def started(call: Any) -> pb.Started:
    """From here on the engine knows the request."""
    response = await call.read()
    assert response.WhichOneof("event") == "started"
    return response.started


def kinds(responses: list[pb.GenerateResponse]) -> list[str | None]:
    return [response.WhichOneof("event") for response in responses]


def text_of(responses: list[pb.GenerateResponse]) -> str:
    return "".join(response.chunk.text for response in responses)


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await (read_all(call) if hasattr(call, "read") else call)
    return error.value.code(), error.value.details() or ""


async def until(is_so: Any) -> None:
    """Waits for what another task or process brings about; the deadline is the test's."""
    async with asyncio.timeout(SECONDS):
        while not is_so():  # noqa: ASYNC110 - also of what other processes do
            await asyncio.sleep(0.005)


def says(text: str) -> Any:
    """A script: the engine answers every request with this text."""

    def script(engine: FakeEngine, submission: Any) -> None:
        engine.speak(submission.new.request_id, ids(text))
        if submission.new.request_id in engine.live:
            engine.end(submission.new.request_id)

    return script


def delta(request_id: str, text: str) -> Delta:
    return Delta(request_id, 0, [1], text)


async def nothing_is_left(channel: grpc.aio.Channel) -> None:
    """No live request, and every chunk free: waits for what the last clients left behind."""
    admin: Any = admin_pb2_grpc.AdminStub(channel)
    async with asyncio.timeout(6 * SECONDS):
        while True:
            listed = await admin.ListRequests(admin_pb2.ListRequestsRequest(), timeout=SECONDS)
            cache = await admin.GetCache(admin_pb2.GetCacheRequest(), timeout=SECONDS)
            if (
                listed.total == 0
                and cache.chunks_free == cache.chunks_total
                and cache.swap_chunks_free == cache.swap_chunks_total
            ):
                return
            await asyncio.sleep(0.02)
