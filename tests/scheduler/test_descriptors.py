"""File descriptors: what clients leave to the worker link."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from client import Chairlift, Unavailable
from scheduler_svc.settings.descriptors import (
    MAX_CONNECTIONS,
    RESERVED,
    max_connections,
    raise_limit,
)
from tests.support.processes import free_port
from tests.support.small_tokenizers import chat

LIMIT = 128
SECONDS = 60.0  # longer than anything takes on a busy machine

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `python -P -m …`; its descriptors may be limited."""
    with contextlib.ExitStack() as stack:

        def make(*line: str, limit: int | None = None) -> subprocess.Popen[bytes]:
            def set_limit() -> None:
                if limit is not None:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

            log = stack.enter_context((tmp_path / "log").open("ab"))
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", *line], stdout=log, stderr=log, preexec_fn=set_limit
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield make


def test_clients_leave_descriptors_to_a_worker_that_comes_back(
    start: Start, tmp_path: Path
) -> None:
    """libzmq aborts the process when it cannot accept a worker; every stream would be lost."""
    chat().save_pretrained(tmp_path / "model")
    port, address = free_port(), f"ipc://{tmp_path}/w"
    options = ["--host", "127.0.0.1", "--port", str(port), "--worker-address", address]
    scheduler = start("scheduler_svc", *options, limit=LIMIT)
    worker_line = ["tests.support.simulated_worker", address, "--vocab-size", "258"]
    worker_line += ["--model-path", str(tmp_path / "model"), "--step-ms", "20"]
    worker = start(*worker_line)
    with contextlib.ExitStack() as stack:
        chairlift = stack.enter_context(Chairlift(f"127.0.0.1:{port}"))

        def wait_until_worker_is(state: str) -> None:
            deadline = time.monotonic() + SECONDS
            found = ""
            while found != state:
                assert scheduler.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline, f"the worker is {found}, not {state}"
                with contextlib.suppress(Unavailable):
                    found = chairlift.server_info(timeout=SECONDS).worker
                time.sleep(0.05)

        wait_until_worker_is("ready")
        num_open = len(os.listdir(f"/proc/{scheduler.pid}/fd"))
        for _ in range(200):
            idle = stack.enter_context(socket.socket())
            idle.connect(("127.0.0.1", port))
        while num_open < LIMIT - RESERVED:  # until the clients have their share
            assert scheduler.poll() is None, (tmp_path / "log").read_text()
            num_open = len(os.listdir(f"/proc/{scheduler.pid}/fd"))
        worker.kill()
        wait_until_worker_is("connecting")
        start(*worker_line)
        wait_until_worker_is("ready")


def test_the_bound_follows_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound of 0 would let nobody in, one above the limit would keep nothing back."""
    limits = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limits))
    assert 1024 - RESERVED - 200 < max_connections() < 1024 - RESERVED
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.__setitem__(0, pair[0]))
    raise_limit()
    assert limits == [4096, 4096]
    limits[0] = 16
    assert max_connections() == 1
    limits[0] = resource.RLIM_INFINITY
    assert max_connections() == MAX_CONNECTIONS
