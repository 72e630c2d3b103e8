"""Where a channel goes: past proxies on this machine, and back soon to a server that starts."""

from __future__ import annotations

import re
import socket
import threading
import time

import pytest

from client import AsyncChairlift, Chairlift, ChairliftError
from client.connection import channel_options, is_loopback
from client.processes.launch import LaunchError
from client.processes.local_server import LocalServer, _endpoint, _reachable
from tests.support.fake_server import FakeEngine, start


@pytest.mark.parametrize(
    ("target", "is_local"),
    [
        ("localhost:50051", True),
        ("LOCALHOST:50051", True),
        ("api.localhost:1", True),
        ("127.0.0.1:50051", True),
        ("127.8.9.1:50051", True),
        ("[::1]:50051", True),
        ("0.0.0.0:50051", True),
        ("dns:///localhost:50051", True),
        ("dns:localhost:50051", True),
        ("ipv4:127.0.0.1:50051", True),
        ("ipv6:[::1]:50051", True),
        ("unix:/run/chairlift.sock", True),
        ("localhost.:50051", True),
        ("ip6-localhost:50051", True),
        ("[::ffff:127.0.0.1]:50051", True),
        (f"{socket.gethostname().upper()}:50051", True),
        ("gpu7:50051", False),
        ("10.0.0.7:50051", False),
        ("localhost.example:50051", False),
        ("dns://8.8.8.8/gpu7:50051", False),
        ("[::ffff:10.0.0.7]:50051", False),
        ("", False),
        ("[::1", False),
        ("host[2J:1", False),
    ],
)
def test_loopback_is_recognised(target: str, is_local: bool) -> None:
    """A proxy cannot reach this machine's loopback; elsewhere it may be the only way."""
    assert is_loopback(target) is is_local
    assert (("grpc.enable_http_proxy", 0) in channel_options(target)) is is_local


@pytest.mark.parametrize("target", ["[::1", "127.0.0.1:port", ":1", "no host:1"])
async def test_a_target_that_is_none_is_named(target: str) -> None:
    """A forgotten bracket is reported in a sentence, by both clients, not in a traceback."""
    with Chairlift(target) as chairlift, pytest.raises(ChairliftError, match=re.escape(target)):
        chairlift.server_info(timeout=5)
    async with AsyncChairlift(target) as chairlift:
        with pytest.raises(ChairliftError, match=re.escape(target)):
            await chairlift.server_info(timeout=5)


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_loopback_never_goes_through_a_proxy(
    address: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A company's proxy in the environment, and not even the own server is found."""
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with Chairlift(address) as chairlift:
        assert chairlift.is_ready(timeout=10)


def test_a_server_that_starts_later_is_noticed() -> None:
    """gRPC alone doubles its pause with every try: it would look again after minutes."""
    engine = FakeEngine()
    server, address = start(engine)
    server.stop(None).wait()
    port = int(address.rpartition(":")[2])
    options = dict(channel_options(address))
    assert options["grpc.max_reconnect_backoff_ms"] <= 1_000
    started: list[object] = []
    was_missed = threading.Event()

    def start_later() -> None:
        assert was_missed.wait(60)
        time.sleep(1.0)  # in which gRPC tries again, and pauses
        started.append(start(engine, port)[0])

    thread = threading.Thread(target=start_later)
    thread.start()
    with Chairlift(address) as chairlift:
        assert not chairlift.is_ready(timeout=0.1)
        was_missed.set()
        chairlift.wait_ready(timeout=30)
    thread.join()
    started[0].stop(None).wait()  # type: ignore[attr-defined]


async def test_a_server_that_does_not_answer_yet_is_not_ready() -> None:
    """While a server starts its port may be open and silent: that is no error of the asker."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with Chairlift(address) as chairlift:
            assert chairlift.is_ready(timeout=0.2) is False
        async with AsyncChairlift(address) as chairlift:
            assert await chairlift.is_ready(timeout=0.2) is False


@pytest.mark.parametrize(
    ("options", "host", "port"),
    [
        ([], "127.0.0.1", None),
        (["--port", "0"], "127.0.0.1", None),
        (["--port=5999", "--num-blocks", "9"], "127.0.0.1", "5999"),
        (["--host", "0.0.0.0"], "0.0.0.0", None),
        (["--host=::1", "--port", "7"], "::1", "7"),
    ],
)
def test_what_the_user_overrides_is_what_is_waited_for(
    options: list[str], host: str, port: str | None
) -> None:
    """`bench --serve -- --port 0` waited ten minutes at a port where nobody listens."""
    found_host, found_port, others = _endpoint(options)
    assert found_host == host
    assert found_port == port if port else int(found_port) > 0
    assert others == (["--num-blocks", "9"] if "9" in options else [])


def test_a_client_finds_a_server_that_listens_everywhere() -> None:
    """Nobody can connect to the address that means all addresses, on every system."""
    assert [_reachable(host) for host in ("0.0.0.0", "::", "::1", "gpu7")] == [
        "127.0.0.1",
        "[::1]",
        "[::1]",
        "gpu7",
    ]


def test_another_server_is_not_taken_for_the_own_one() -> None:
    """`bench --serve -- --port 50051` measured whatever already ran there, and said nothing."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match=f"already listens on 127.0.0.1, port {port}"):
            LocalServer(["--port", str(port)])


@pytest.mark.parametrize("seconds", [1e18, float("inf")])
async def test_a_very_long_timeout_is_none_that_has_passed(address: str, seconds: float) -> None:
    """gRPC's clock overflows, and a call without any limit would fail at once."""
    with Chairlift(address, timeout=seconds) as chairlift:
        assert chairlift.is_ready()
        assert chairlift.complete("count 2", timeout=seconds).text
    async with AsyncChairlift(address) as chairlift:
        assert (await chairlift.complete("count 2", timeout=seconds)).text
