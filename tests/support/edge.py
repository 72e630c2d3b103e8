"""A running gRPC edge: the server's public side, with a fake engine behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from scheduler_svc.front.server import Server
from tests.support.fake_engine import FakeEngine


@dataclass(eq=False)
class Edge:
    """Everything a test needs of one running edge."""

    server: Server
    engine: FakeEngine
    channel: grpc.aio.Channel
    inference: Any
    admin: Any


async def stop(edge: Edge) -> None:
    await edge.channel.close()
    await edge.server.drain_and_stop()
    assert edge.engine.live == {}, "a request outlived its client"
