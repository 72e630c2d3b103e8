"""Scheduler and worker as two services: each may be restarted without the other."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from client import Chairlift
from tests.support.processes import Server
from tests.support.services import Services

READY_SECONDS = 60.0


@pytest.fixture
def services(tmp_path: Path, tiny_model: Path) -> Iterator[Services]:
    services = Services(tmp_path, tiny_model)
    yield services
    services.stop()


def restart(services: Services, rounds: int, *how: signal.Signals) -> None:
    with Chairlift(f"127.0.0.1:{services.port}") as chairlift:
        for round in range(rounds + 1):
            if round:
                services.restart_scheduler(how[round % len(how)])
            try:
                chairlift.wait_ready(READY_SECONDS)
                answer = chairlift.complete("hello", max_tokens=2, ignore_eos=True, timeout=30)
            except Exception as error:
                raise AssertionError(
                    f"restart {round}: {error}\n{services.log.read_text()}"
                ) from error
            assert answer.usage.completion_tokens == 2


def test_a_scheduler_restarts_beside_its_worker(services: Services) -> None:
    """The worker keeps its model and is ready at once, while the scheduler still imports."""
    restart(services, 2, signal.SIGTERM)


@pytest.mark.slow
def test_a_scheduler_restarts_twenty_times(services: Services) -> None:
    """The same, often enough for what depends on a few milliseconds."""
    restart(services, 20, signal.SIGTERM, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("tokenizer.json", None, "there is no tokenizer.json"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        ("generation_config.json", '{"top_k": true}', "top_k is True; allowed: an integer"),
    ],
)
def test_serve_ends_where_the_model_cannot_be_served(
    tmp_path: Path, tiny_model: Path, name: str, content: str | None, why: str
) -> None:
    """Not ready for ever, with a worker that holds the memory and a start that nobody repeats."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / name).unlink()
    if content is not None:
        (model / name).write_text(content)
    server = Server(tmp_path / "serve.log", model=model, num_blocks=50)
    with server.log.open("wb") as log:
        done = subprocess.run(
            server.line, stdout=log, stderr=subprocess.STDOUT, timeout=READY_SECONDS, check=False
        )
    text = server.log.read_text()
    assert done.returncode == 2, text
    assert f"chairlift scheduler: the tokenizer and configuration of {model}" in text
    assert why in text
    assert "Traceback" not in text
