"""How `serve` and its process end when something goes wrong: with a sentence, and whole."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from scheduler_svc import __main__
from scheduler_svc.front import server as server_module
from scheduler_svc.front.server import INFERENCE, CannotListen, EngineCrashed, ModelRefused, serve
from scheduler_svc.settings import systemd
from scheduler_svc.settings.config import Config
from scheduler_svc.text.tokenizer import Tokenizer
from tests.scheduler.test_server import NOT_SERVING, health, process
from tests.support.calls import SECONDS
from tests.support.edge import Edge, stop
from tests.support.fake_engine import FakeEngine
from tests.support.small_tokenizers import chat

ROOT = Path(__file__).parents[2]


def load(path: str) -> Tokenizer:
    return Tokenizer(chat())


async def served(config: Config, engine: Any, load: Any = load) -> None:
    await asyncio.wait_for(serve(config, engine, load), SECONDS)


async def test_an_exception_after_the_start_stops_the_engine(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread would keep a process that listens to nobody, for ever."""

    def breaks(message: str) -> bool:
        raise RuntimeError("no such socket")

    monkeypatch.setattr(systemd, "notify", breaks)
    engine: Any = FakeEngine()
    with pytest.raises(RuntimeError, match="no such socket"):
        await served(config, engine)
    assert not engine.is_running


async def test_an_exception_while_draining_stops_the_engine(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, at the other end."""

    async def breaks(servicer: Any) -> None:
        raise RuntimeError("health is gone")

    monkeypatch.setattr(server_module.health.aio.HealthServicer, "enter_graceful_shutdown", breaks)
    engine: Any = FakeEngine()
    asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGTERM)
    with pytest.raises(RuntimeError, match="health is gone"):
        await served(config, engine)
    assert not engine.is_running


async def test_a_worker_address_that_cannot_be_bound(config: Config) -> None:
    """It is a wrong setting, not a crash: a new start would not help."""

    class CannotBind(FakeEngine):
        def start(self, on_crash: Any = None) -> None:
            raise OSError("worker_address ipc://x cannot be bound")

    with pytest.raises(CannotListen, match="worker_address ipc://x"):
        await asyncio.wait_for(serve(config, CannotBind(), load), SECONDS)  # type: ignore[arg-type]


async def test_a_broken_mirror_ends_the_process(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load balancer would go on sending requests to a server that is not ready."""

    async def breaks(server: Any) -> None:
        raise ValueError("health does not follow")

    monkeypatch.setattr(server_module.Server, "_mirror_readiness", breaks)
    engine: Any = FakeEngine()
    with pytest.raises(EngineCrashed, match="ValueError: health does not follow"):
        await served(config, engine)
    assert not engine.is_running


def broken(path: str) -> Tokenizer:
    raise ValueError("generation_config.json: top_k is True; allowed: an integer")


def refuse(engine: FakeEngine, is_fault: bool) -> None:
    """The worker says that it can never serve this; or it can, and its tokenizer is broken."""
    if is_fault:
        engine.become(worker="none", fatal_error="cannot load: top_k is True")
    else:
        engine.become_ready()


@pytest.mark.parametrize("is_fault", [False, True])
async def test_a_model_that_cannot_be_served_is_told_everywhere(
    config: Config, is_fault: bool
) -> None:
    """To whoever waits, to whoever comes, to operators and to load balancers."""
    engine: Any = FakeEngine()
    server = server_module.Server(config, engine, broken)
    await server.start(lambda error: None)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert (await stub.GetServerInfo(pb.GetServerInfoRequest())).error == ""
        early = stub.Generate(pb.GenerateRequest(text="hello"), timeout=SECONDS)
        while not server.num_live:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.005)
        refuse(engine, is_fault)
        late = stub.Generate(pb.GenerateRequest(text="hello"), timeout=SECONDS)
        for call in (early, late):
            assert await call.code() == grpc.StatusCode.UNAVAILABLE
            assert "top_k is True" in await call.details()
        with pytest.raises(grpc.aio.AioRpcError, match="top_k is True"):
            await stub.GetModelInfo(pb.GetModelInfoRequest())
        info = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.is_ready, info.worker) == (False, "none" if is_fault else "ready")
        assert "top_k is True" in info.error
        edge = Edge(server, engine, channel, stub, None)
        assert await health(edge, INFERENCE) == NOT_SERVING
        await stop(edge)


@pytest.mark.parametrize("is_fault", [False, True])
async def test_a_model_error_ends_the_process_where_asked(config: Config, is_fault: bool) -> None:
    """`chairlift serve` would stay "not ready" for ever, with a worker that holds the memory."""
    engine: Any = FakeEngine()
    loop = asyncio.get_running_loop()
    loop.call_later(0.2, lambda: refuse(engine, is_fault))
    with pytest.raises(ModelRefused, match="top_k is True"):
        await served(replace(config, exit_on_model_error=True), engine, broken)
    assert not engine.is_running


# As processes


async def test_a_socket_that_systemd_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that was inherited from somewhere must not decide about serving."""
    monkeypatch.setenv("NOTIFY_SOCKET", "/nonexistent/x")
    async with process() as (child, stub):
        info = await stub.GetServerInfo(pb.GetServerInfoRequest(), wait_for_ready=True)
        assert info.worker == "ready"
        child.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(child.wait(), 2 * SECONDS) == 0


def ends(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A scheduler that ends by itself."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "scheduler_svc", "--host", "127.0.0.1", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
    )


def one_sentence(done: subprocess.CompletedProcess[str]) -> str:
    """What it says, when that is all."""
    assert done.returncode == 2, done.stderr
    grpcs_own = re.compile(r"[EWI]\d{4} ")
    lines = [
        line
        for line in done.stderr.splitlines()
        if " INFO " not in line and not grpcs_own.match(line)
    ]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_an_early_exit_is_one_sentence(tmp_path: Path) -> None:
    """A traceback of another thread below it hides the one line that says what to change."""
    address = f"--worker-address=ipc://{tmp_path}/worker"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = one_sentence(ends("--port", str(port), address))
    assert text.startswith(f"chairlift scheduler: cannot listen on 127.0.0.1:{port}")
    (tmp_path / "folder").mkdir()
    text = one_sentence(ends("--port", "0", "--worker-address", f"ipc://{tmp_path}/folder"))
    assert text.startswith(f"chairlift scheduler: worker_address ipc://{tmp_path}/folder cannot")


def test_an_unforeseen_exception_is_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With exit code 1, so that the process is started anew, and with where it was in the log."""

    async def breaks(*parts: Any) -> None:
        raise LookupError("unforeseen")

    monkeypatch.setattr(__main__, "serve", breaks)
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    assert __main__.main(["--port", "0"]) == 1
    assert (
        capsys.readouterr().err.splitlines()[-1] == "chairlift scheduler: LookupError: unforeseen"
    )
    assert "in breaks" in caplog.text
