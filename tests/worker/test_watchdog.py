"""A step that never ends ends the process; nothing else does."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_scheduler import FakeScheduler, make_plan
from worker.process import watchdog
from worker.process.watchdog import Watchdog

POLL_SECONDS = 0.01
PATIENCE = 20.0


class BusyLink:
    """What is running, as the test says it."""

    def __init__(self) -> None:
        self.busy = ("idle", 0, 0.0)


class ManyStepsLink:
    """Another step runs at every look."""

    num_looks = 0

    @property
    def busy(self) -> tuple[str, int, float]:
        self.num_looks += 1
        return ("step", self.num_looks, 0.0)


class Watched:
    def __init__(
        self, limit: float, environ: dict[str, str] | None = None, link: Any = None
    ) -> None:
        self.link: Any = link or BusyLink()
        self.ended = threading.Event()
        self.watchdog = Watchdog(self.link, self.ended.set, environ or {})
        self.watchdog.limit = limit
        self.watchdog.start()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(watchdog, "POLL_SECONDS", POLL_SECONDS)
    made: list[Watched] = []

    def make(*arguments: Any, **options: Any) -> Watched:
        made.append(Watched(*arguments, **options))
        return made[-1]

    yield make
    for watched in made:
        watched.watchdog.stop()


def test_a_step_that_outlives_its_limit_ends_the_process(
    watch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that hangs is never replaced; the log must say what hung."""
    watched = watch(0.1)
    watched.link.busy = ("step", 7, 0.0)
    assert watched.ended.wait(PATIENCE)
    assert "step 7 has run for" in caplog.text
    assert "step_timeout (0.1 s)" in caplog.text


def test_a_log_that_hangs_does_not_keep_the_process_alive(
    watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may hang because nobody reads the log."""
    monkeypatch.setattr(watchdog, "REPORT_SECONDS", 0.05)
    monkeypatch.setattr(Watchdog, "_report", lambda *_: threading.Event().wait(PATIENCE))
    watched = watch(0.1)
    watched.link.busy = ("step", 7, 0.0)
    assert watched.ended.wait(PATIENCE)


def test_nothing_else_ends_it(watch: Any) -> None:
    """Loading takes as long as it takes, many steps are not one, and 0 means never."""
    loading, idle, never = watch(0.1), watch(0.1), watch(0.0)
    steps = watch(0.1, link=ManyStepsLink())
    loading.link.busy = ("loading", 0, 0.5)
    never.link.busy = ("step", 3, 0.0)
    while steps.link.num_looks < 40:  # four times the limit, at least
        time.sleep(POLL_SECONDS)
    assert not any(watched.ended.is_set() for watched in (loading, idle, never, steps))


def test_time_in_which_the_process_was_stopped_does_not_count(
    watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that was suspended and goes on would end of a step that is quite well."""
    hours = 0

    def monotonic() -> float:
        nonlocal hours
        hours += 1
        return hours * 3600.0

    monkeypatch.setattr(watchdog.time, "monotonic", monotonic)
    watched = watch(1.0)  # 50 looks of at most 0.02 s
    watched.link.busy = ("step", 7, 0.0)
    while hours < 40:
        threading.Event().wait(POLL_SECONDS)
    assert not watched.ended.is_set()


def test_systemd_is_pinged_until_a_step_hangs(
    watch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pings that outlive the step would keep a worker alive that nothing else can end."""
    address = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.settimeout(PATIENCE)
        systemd.bind(address)
        other = watch(0.0, environ={"WATCHDOG_USEC": "40000", "WATCHDOG_PID": "1"})
        watched = watch(0.1, environ={"WATCHDOG_USEC": "40000", "WATCHDOG_PID": str(os.getpid())})
        assert systemd.recv(100) == b"WATCHDOG=1"
        watched.link.busy = ("step", 7, 0.0)
        assert watched.ended.wait(PATIENCE)
        watched.watchdog.stop()
        systemd.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while systemd.recv(100):
                pass
        time.sleep(5 * POLL_SECONDS)
        with pytest.raises(BlockingIOError):
            systemd.recv(100)
        assert not other.ended.is_set()


HANGING = """
import logging, sys, time
from protos import link_pb2
from tests.worker.test_loop import FakeRunner
from worker.process.link import SchedulerLink
from worker.process.loop import serve

class Hangs(FakeRunner):
    def launch(self, plan, mask_of=None):
        step = super().launch(plan)
        if plan.step_id == 2 and sys.argv[2] == "launch":
            time.sleep(1000)
        if plan.step_id == 2:
            step.wait = lambda: time.sleep(1000)
        return step

logging.basicConfig()
sys.exit(serve(SchedulerLink(sys.argv[1], link_pb2.Hello()), lambda configure, progress: Hangs()))
"""


@pytest.mark.parametrize("where", ["launch", "wait"])
def test_a_process_whose_step_hangs_ends_by_itself(tmp_path: Path, where: str) -> None:
    """The threads that hang cannot be told to stop; whoever starts workers must see a failure."""
    scheduler = FakeScheduler(f"ipc://{tmp_path}/link", beats=True)
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, f"ipc://{tmp_path}/link", where],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        scheduler.configure(step_timeout=0.5)
        scheduler.receive("ready")
        for step_id in (1, 2):
            scheduler.send_plan(make_plan(step_id, token_ids=[1]))
        assert scheduler.receive_result().step_id == 1
        _, log = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
        scheduler.close()
    assert process.returncode == 1
    assert "step 2 has run for" in log
    where_it_hung = {"launch": "in launch", "wait": "worker/process/completion.py"}[where]
    assert where_it_hung in log, "the log does not say where it hung"
