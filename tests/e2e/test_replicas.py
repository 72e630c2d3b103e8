"""Two scheduler-worker pairs behind one gateway: prefixes stick, and a killed pair is survived."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client import Chairlift
from tests.support.openai_http import MISSING, NEEDS, gateway
from tests.support.processes import Server

pytestmark = pytest.mark.skipif(bool(MISSING), reason=NEEDS)

MODEL = "tiny"


@pytest.fixture(scope="module")
def pairs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Both are started before the first is awaited. One of them may be dead at the end."""
    logs = tmp_path_factory.mktemp("log")
    servers = [
        Server(
            logs / f"{name}.log",
            model=tiny_model,
            served_model_name=MODEL,
            num_blocks=600,
            max_requests_per_batch=24,
        )
        for name in ("one", "two")
    ]
    starting = [threading.Thread(target=server.__enter__) for server in servers]
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join()
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def client(pairs: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import openai

    log = tmp_path_factory.mktemp("log") / "smg.log"
    with (
        gateway(log, [server.port for server in pairs]) as port,
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60
        ) as client,
    ):
        yield client


def ask(client: Any, prompt: str) -> Any:
    return client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)


def num_queried(server: Server) -> int:
    """Prompt tokens of the requests that a pair has served."""
    with Chairlift(server.address) as chairlift:
        return chairlift.get_cache().prefix_queries


def test_a_shared_prefix_sticks_to_one_pair(client: Any, pairs: list[Server]) -> None:
    """Routing by turns computes every prefix twice; without events nobody knows who has it."""
    for letter in "abcdef":
        prefix = letter * 200
        first = ask(client, prefix + "1")
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        for ending in "23":
            cached = ask(client, prefix + ending).usage.prompt_tokens_details.cached_tokens
            assert cached >= 192, f"{letter}: {cached} tokens from the cache"


def test_a_killed_pair_is_survived(client: Any, pairs: list[Server]) -> None:
    """Requests to the dead pair fail, hang, or wait for a health check."""
    dead = pairs[0]
    children = [dead.child("scheduler_svc"), dead.child("worker")]
    dead.process.kill()  # first, or it would start another worker
    for child in children:
        os.kill(child, signal.SIGKILL)
    for number in range(20):
        answer = ask(client, f"{number}, and something of a prompt")
        assert answer.choices[0].finish_reason == "length"
