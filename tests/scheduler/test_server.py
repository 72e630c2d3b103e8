"""The server around the services: health, reflection, limits, ports, and how it stops."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from scheduler_svc.front.server import INFERENCE, CannotListen, EngineCrashed, serve
from scheduler_svc.settings.config import Config
from tests.support.edge import Edge, stop
from tests.support.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(edge: Edge, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(edge.channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def test_health_tells_alive_from_ready(unready_edge: Edge) -> None:
    """A load balancer must not send requests to a server whose worker is gone."""
    stub = health_pb2_grpc.HealthStub(unready_edge.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
    assert (await watch.read()).status == NOT_SERVING
    assert await health(unready_edge, "") == SERVING
    unready_edge.engine.become_ready()
    assert (await watch.read()).status == SERVING
    unready_edge.engine.become(worker="connecting")
    assert (await watch.read()).status == NOT_SERVING
    unready_edge.engine.become_ready()
    assert (await watch.read()).status == SERVING
    assert await health(unready_edge, "") == SERVING
    watch.cancel()


async def test_health_of_an_unknown_service(edge: Edge) -> None:
    """What the protocol asks for; a typo in a probe must not read as healthy."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await health(edge, "chairlift.v1.Typo")
    assert error.value.code() == grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_all_services(edge: Edge) -> None:
    """grpcurl works without proto files."""
    stub = reflection_pb2_grpc.ServerReflectionStub(edge.channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert names == {
        "chairlift.v1.Inference",
        "chairlift.v1.Admin",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "vllm.grpc.engine.VllmEngine",
    }
    await call.done_writing()


async def test_a_taken_port_is_an_error(make_edge: Any, config: Config) -> None:
    """With SO_REUSEPORT a second server would start, and silently take half the connections."""
    edge = await make_edge(config)
    with pytest.raises(CannotListen, match=rf"127\.0\.0\.1:{edge.server.port}.*--port"):
        await make_edge(replace(config, port=edge.server.port))
    await stop(edge)


async def test_the_message_limit_is_the_configured_one(make_edge: Any, config: Config) -> None:
    """grpc's own 4 MiB are less than a long prompt as tokens needs."""
    edge = await make_edge(replace(config, max_message_bytes=50_000))
    stub = edge.inference
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Tokenize(pb.TokenizeRequest(text="x" * 60_000))
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len((await stub.Tokenize(pb.TokenizeRequest(text="x" * 10_000))).token_ids) == 10_000
    await stop(edge)


async def test_more_than_four_mebibytes_pass_by_default(edge: Edge) -> None:
    """A long prompt must be refused by its length in tokens, not in bytes."""
    request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[299] * (3 << 20)))
    assert request.ByteSize() > 4 << 20
    code, details = await code_of(edge.inference.Generate(request))
    assert (code, "max_model_len" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


# How it stops


@asynccontextmanager
async def process(*options: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Any]]:
    """A server process and a stub of it; killed at the end should it still run."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.serving_process",
        "--host", "127.0.0.1", "--port", "0", *options,
        cwd=ROOT, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            line = await line_with(child, "listening on")
        port = re.findall(r"127\.0\.0\.1:(\d+)", line)[0]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield child, inference_pb2_grpc.InferenceStub(channel)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def line_with(child: asyncio.subprocess.Process, words: str) -> str:
    """The next line of the log that says so."""
    assert child.stderr is not None
    while line := (await child.stderr.readline()).decode():
        if words in line:
            return line
    raise AssertionError(f"the server ended without saying {words!r}")


async def begin(stub: Any) -> Any:
    """A stream that is under way and will not end by itself."""
    call = stub.Generate(pb.GenerateRequest(request_id="r", text="hello"), wait_for_ready=True)
    assert (await call.read()).WhichOneof("event") == "started"
    assert (await call.read()).WhichOneof("event") == "chunk"
    return call


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """The status, once the stream has ended."""
    code = await call.code()
    return code, await call.details() or ""


async def test_sigterm_drains_and_exits_cleanly() -> None:
    """Streams end by themselves within the grace, nobody new gets in, exit code 0."""
    async with process("--drain-grace", "30") as (child, stub):
        call = await begin(stub)
        child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            await line_with(child, "stopping")
            newcomer = stub.Generate(pb.GenerateRequest(request_id="r2", text="hello"))
            code, details = await code_of(newcomer)
            assert (code, "draining" in details) == (grpc.StatusCode.UNAVAILABLE, True)
            info = await stub.GetServerInfo(pb.GetServerInfoRequest())
            assert not info.is_ready, "an operator is told to send more"
            await stub.Abort(pb.AbortRequest(request_ids=["r"]))
            assert (await call.read()).complete.finish_reason == "abort"
            assert await child.wait() == 0


async def test_past_the_grace_streams_end_unavailable() -> None:
    """A stream that never ends must not keep the process from stopping."""
    async with process("--drain-grace", "0.2") as (child, stub):
        call = await begin(stub)
        child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            code, details = await code_of(call)
            assert (code, "stopped" in details) == (grpc.StatusCode.UNAVAILABLE, True)
            assert await child.wait() == 0


async def test_a_second_signal_cuts_the_grace_short() -> None:
    """Whoever presses Ctrl-C twice means it."""
    async with process("--drain-grace", "300") as (child, stub):
        call = await begin(stub)
        child.send_signal(signal.SIGINT)
        async with asyncio.timeout(20):
            await line_with(child, "stopping")
            child.send_signal(signal.SIGINT)
            code, _ = await code_of(call)
            assert code == grpc.StatusCode.UNAVAILABLE
            assert await child.wait() == 0


async def test_a_broken_engine_ends_the_process(config: Config) -> None:
    """A scheduler whose invariants broke must not go on; systemd starts it anew."""

    class Crashes(FakeEngine):
        def start(self, on_crash: Any = None) -> None:
            super().start(on_crash)
            on_crash(ValueError("block counts differ"))

    with pytest.raises(EngineCrashed, match="block counts differ"):
        await asyncio.wait_for(serve(config, Crashes()), 20)  # type: ignore[arg-type]


async def test_a_client_killed_mid_stream_is_an_abort(edge: Edge) -> None:
    """No goodbye at all: the kernel closes the socket, and the engine must hear of it."""
    code = (
        "import grpc, sys\n"
        "from protos import inference_pb2 as pb, inference_pb2_grpc\n"
        f"channel = grpc.insecure_channel('127.0.0.1:{edge.server.port}')\n"
        "stub = inference_pb2_grpc.InferenceStub(channel)\n"
        "for response in stub.Generate(pb.GenerateRequest(request_id='r', text='hello')):\n"
        "    print(response.WhichOneof('event'), flush=True)\n"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=ROOT, stdout=subprocess.PIPE
    )
    async with asyncio.timeout(20):
        assert child.stdout is not None
        assert await child.stdout.readline() == b"started\n"
        child.kill()
        await child.wait()
        while edge.server.num_live:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.005)
    assert edge.engine.aborted == ["r"]


async def test_ipv6_addresses_are_bracketed(make_edge: Any, config: Config) -> None:
    """`--host ::1` is what people write."""
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        edge = await make_edge(replace(config, host="::1"), is_ready=False)
    except CannotListen:
        pytest.skip("no IPv6 loopback here")
    assert edge.server.port > 0
    await stop(edge)
