from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from client import Chairlift
from tests.support.fake_server import FakeEngine, start


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[str]:
    server, address = start(engine)
    yield address
    server.stop(grace=None).wait()


@pytest.fixture
def chairlift(address: str) -> Iterator[Chairlift]:
    with Chairlift(address) as chairlift:
        yield chairlift


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nobody answers, and nobody else can start to."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"
