"""A real grpc.aio server on a free port, with a fake engine behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from protos import admin_pb2_grpc, inference_pb2_grpc
from scheduler_svc.front.server import Server
from scheduler_svc.settings.config import Config
from scheduler_svc.text.tokenizer import Tokenizer
from tests.support.edge import Edge, stop
from tests.support.fake_engine import FakeEngine, fake_views
from tests.support.small_tokenizers import chat


@pytest.fixture
def config() -> Config:
    return Config(host="127.0.0.1", port=0, drain_grace=5.0)


@pytest.fixture
def make_edge(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that starts an edge; the model's tokenizer is a small one made here."""
    monkeypatch.setattr("scheduler_svc.front.admin_service.views", fake_views())

    async def make(config: Config, is_ready: bool = True) -> Edge:
        engine: Any = FakeEngine()
        server = Server(config, engine, lambda path: Tokenizer(chat()))
        await server.start(lambda error: None)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}")
        if is_ready:
            engine.become_ready()
            await server.served.wait_until_ready_is(True)
        return Edge(
            server,
            engine,
            channel,
            inference_pb2_grpc.InferenceStub(channel),
            admin_pb2_grpc.AdminStub(channel),
        )

    return make


@pytest_asyncio.fixture
async def edge(make_edge: Any, config: Config) -> AsyncIterator[Edge]:
    """Ready, and stopped at the end; by then no request may be live."""
    edge = await make_edge(config)
    yield edge
    await stop(edge)


@pytest_asyncio.fixture
async def unready_edge(make_edge: Any, config: Config) -> AsyncIterator[Edge]:
    edge = await make_edge(config, is_ready=False)
    yield edge
    await stop(edge)
