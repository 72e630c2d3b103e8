"""Two scheduler-worker pairs behind one gateway with cache-aware routing."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client import Chairlift
from tests.support.http_gateway import gateway_alone, wait_for_model
from tests.support.processes import Server, free_port

openai = pytest.importorskip("openai", reason="needs the package openai")
pytest.importorskip("smg", reason="needs the extra gateway")


class Replicas:
    def __init__(self, pairs: list[Server], port: int) -> None:
        self.pairs = pairs
        url = f"http://127.0.0.1:{port}/v1"
        self._client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)

    def complete(self, prompt: str, max_tokens: int = 4) -> Any:
        return self._client.completions.create(
            model="tiny", prompt=prompt, max_tokens=max_tokens, temperature=0
        )

    def prefix_queries(self) -> list[int]:
        """Prompt tokens that each pair has looked up."""
        counts: list[int] = []
        for pair in self.pairs:
            with Chairlift(pair.address) as chairlift:
                counts.append(chairlift.get_cache().prefix_queries)
        return counts


@pytest.fixture(scope="module")
def replicas(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    folder = tmp_path_factory.mktemp("replicas")
    pairs = [
        Server(folder / f"{name}.log", model=tiny_model, served_model_name="tiny", num_blocks=600)
        for name in "ab"
    ]
    port, log = free_port(), folder / "smg.log"
    with contextlib.ExitStack() as running:
        for pair in pairs:
            pair.__enter__()
            running.callback(pair.stop)  # whatever its exit code: a test kills one of them
        gateway = gateway_alone(port, free_port(), log, *(f"127.0.0.1:{p.port}" for p in pairs))
        try:
            wait_for_model(port, log, gateway)
            yield Replicas(pairs, port)
        finally:
            gateway.terminate()
            gateway.wait(60)


PREFIX = "The quick brown fox jumps over the lazy dog. " * 5


def test_a_shared_prefix_stays_with_one_pair(replicas: Replicas) -> None:
    """The gateway follows what each prefix cache stores."""
    replicas.complete(PREFIX + "1")
    before = replicas.prefix_queries()
    answers = [replicas.complete(PREFIX + str(number)) for number in range(2, 6)]
    for answer in answers:
        assert answer.usage.prompt_tokens_details.cached_tokens > len(PREFIX) // 2
    looked_up = [now - then for now, then in zip(replicas.prefix_queries(), before, strict=True)]
    assert sorted(count > 0 for count in looked_up) == [False, True]


def test_a_pair_that_dies_takes_no_later_request_with_it(replicas: Replicas) -> None:
    """Killed with answers under way; all that come later are answered by the other pair."""
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            replicas.complete("Once upon a time", max_tokens=300)
        except openai.OpenAIError as error:
            failed.append(error)  # its pair has died

    running = [threading.Thread(target=ask) for _ in range(4)]
    for thread in running:
        thread.start()
    victim = replicas.pairs[0]
    pids = [victim.process.pid, victim.child("scheduler_svc"), victim.child("worker")]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    victim.process.wait()
    for number in range(12):
        answer = replicas.complete(f"{number} later requests")
        assert answer.choices[0].finish_reason in ("length", "stop")
    for thread in running:
        thread.join()
    assert len(failed) < len(running), "the other pair's answers were lost, too"
