"""Two workers at one scheduler, two schedulers at one address; the sockets are real."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protos import link_pb2
from protos.link import PROTOCOL
from scheduler_svc.__main__ import main
from scheduler_svc.core.limits import Limits
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.worker_link import WorkerLink
from tests.support.engine_harness import GEOMETRY
from tests.support.memory_link import MemoryLink
from worker.process.link import LinkClosed, SchedulerLink
from worker.process.session import SessionEnded

PATIENCE = 20.0


class Worker:
    """Loads until it is told that it is `loaded`, then waits for plans."""

    def __init__(self, address: str, name: str) -> None:
        self.link = SchedulerLink(address, link_pb2.Hello(protocol=PROTOCOL, host=name, pid=1))
        self.num_configures = 0
        self.loaded = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._live)
        self._thread.start()

    def close(self, reason: str) -> None:
        self._is_closed = True
        self.link.close(reason)
        self.loaded.set()
        self._thread.join()

    def _live(self) -> None:
        try:
            while True:
                session = self.link.accept()
                self.num_configures += 1
                self.loaded.wait()
                if self._is_closed:
                    return
                session.send_ready(MemoryLink(GEOMETRY, 4).ready_message())
                try:
                    while True:
                        session.receive()
                except SessionEnded:
                    pass
        except LinkClosed:
            pass


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(
        Limits(16, 4),
        link_pb2.Configure(),
        WorkerLink(f"ipc://{tmp_path}/w", 0xA1),
        heartbeat_timeout=10.0,
    )
    engine.start()
    yield engine
    engine.stop()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_second_worker_never_leaves_the_service_without_one(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one was sent away for good, and nobody restarts what has not ended."""
    monkeypatch.setattr("worker.process.link.STANDBY_SECONDS", 0.1)
    address = f"ipc://{tmp_path}/w"

    def serves() -> str:
        serving = engine._session._serving
        return "" if serving is None else serving.name.partition(",")[0]

    first = Worker(address, "first")
    first.loaded.set()
    wait_for(lambda: serves() == "first")
    second = Worker(address, "second")
    wait_for(lambda: second.num_configures == 1)
    assert serves() == "first"
    second.close("it changed its mind while it loaded")
    wait_for(lambda: not engine._session._loading)
    assert serves() == "first"

    third = Worker(address, "third")
    third.loaded.set()
    wait_for(lambda: serves() == "third")
    time.sleep(0.5)  # in which the first one offers itself several times
    assert (serves(), first.num_configures, third.num_configures) == ("third", 1, 1)
    third.close("killed")
    wait_for(lambda: serves() == "first")
    first.close("the test is over")


def test_a_second_scheduler_at_the_address_says_so_and_ends(
    engine: Engine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It took the workers of the first one, which waited for them for ever."""
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    address = f"ipc://{tmp_path}/w"
    code = main(["--host", "127.0.0.1", "--port", "0", "--worker-address", address])
    assert code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"worker_address {address} cannot be bound: another scheduler listens" in message
    assert "--worker-address" in message
    worker = Worker(address, "late")
    worker.loaded.set()
    wait_for(lambda: engine.status.is_ready)
    worker.close("the test is over")
