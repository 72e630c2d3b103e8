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


def serving(client: Any, pairs: list[Server], prompt: str) -> tuple[Server, Any]:
    """Asks once; the one pair that served it, and the answer."""
    before = [num_queried(pair) for pair in pairs]
    answer = ask(client, prompt)
    moved = [pair for pair, old in zip(pairs, before, strict=True) if num_queried(pair) > old]
    (pair,) = moved
    return pair, answer


def test_a_shared_prefix_sticks_to_one_pair(client: Any, pairs: list[Server]) -> None:
    """Routing by turns computes every prefix twice; without events nobody knows who has it."""
    for letter in "abcd":
        prefix = letter * 200
        pair, first = serving(client, pairs, prefix + "1")
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        for ending in "234":
            again, answer = serving(client, pairs, prefix + ending)
            assert again is pair, letter
            assert answer.usage.prompt_tokens_details.cached_tokens == 192  # whole pages of 16


def test_a_killed_pair_is_survived(client: Any, pairs: list[Server]) -> None:
    """Requests to the dead pair fail, hang, or wait for a health check; those whose prefix it had
    above all."""
    prefix = "z" * 200
    dead, _ = serving(client, pairs, prefix)
    children = [dead.child("scheduler_svc"), dead.child("worker")]
    dead.process.kill()  # first, or it would start another worker
    for child in children:
        os.kill(child, signal.SIGKILL)
    for number in range(20):
        answer = ask(client, prefix if number % 2 else f"{number}, and another prompt")
        assert answer.choices[0].finish_reason in ("length", "stop")
