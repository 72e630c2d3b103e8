"""The worker's day, with a fake runner and a fake scheduler over a real socket."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from protos import link_pb2
from protos.plan import StepPlan, StepResult
from tests.support.fake_scheduler import FakeScheduler, make_plan
from worker.process.device_failure import DeviceFailed
from worker.process.link import SchedulerLink
from worker.process.loop import serve
from worker.process.progress import Progress


class FakeRunner:
    """Answers token_ids + 1; a plan with the token 13 in it raises when it is launched, one with 65
    when its result is due, one with 14 finds the device broken."""

    def __init__(self, num_chunks: int = 1) -> None:
        self.num_chunks = num_chunks

    def ready(self) -> link_pb2.Ready:
        return link_pb2.Ready(num_chunks=self.num_chunks)

    def launch(
        self, plan: StepPlan, mask_of: Callable[[], link_pb2.Mask] | None = None
    ) -> FakeStep:
        if 13 in plan.token_ids:
            raise RuntimeError("thirteen")
        if 14 in plan.token_ids:
            raise DeviceFailed("fourteen")
        result = StepResult(
            step_id=plan.step_id,
            device_microseconds=1,
            queue_microseconds=0,
            token_ids=plan.token_ids + np.int32(1),
            is_finite=np.zeros(0, np.int32),
        )
        return FakeStep(result)


class FakeStep:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        if 66 in self._result.token_ids:
            raise RuntimeError("an illegal memory access was encountered")
        return self._result


class Serving:
    """`serve` in a thread of its own, as the main thread of a worker."""

    def __init__(self, address: str, build: Callable[..., FakeRunner]) -> None:
        self.link = SchedulerLink(
            address, link_pb2.Hello(), heartbeat_seconds=0.02, peer_timeout=60
        )
        self.exit_code: int | None = None
        self._thread = threading.Thread(target=self._run, args=(build,))
        self._thread.start()

    def _run(self, build: Callable[..., FakeRunner]) -> None:
        try:
            self.exit_code = serve(self.link, build)
        except Exception as error:  # LinkClosed, when the test is over
            self.ended_by: Exception = error

    def join(self) -> int | None:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.exit_code


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/link"


@pytest.fixture
def scheduler(address: str) -> Iterator[FakeScheduler]:
    scheduler = FakeScheduler(address)
    yield scheduler
    scheduler.close()


@pytest.fixture
def start(address: str) -> Iterator[Callable[[Callable[..., FakeRunner]], Serving]]:
    started: list[Serving] = []

    def make(
        build: Callable[..., FakeRunner] = lambda configure, progress: FakeRunner(),
    ) -> Serving:
        started.append(Serving(address, build))
        return started[-1]

    yield make
    for serving in started:
        serving.link.close("the test is over")
        serving.join()


Start = Callable[..., Serving]


def test_steps_are_answered_in_order(start: Start, scheduler: FakeScheduler) -> None:
    """The plain path: Configure, Ready, plans, results with the time they queued."""
    start()
    scheduler.configure(model="tiny")
    assert scheduler.receive("ready").ready.num_chunks == 1
    for step_id in (1, 2, 3):
        scheduler.send_plan(make_plan(step_id, token_ids=[step_id, 40]))
    for step_id in (1, 2, 3):
        result = scheduler.receive_result()
        assert (result.step_id, result.token_ids.tolist()) == (step_id, [step_id + 1, 41])
        assert result.queue_microseconds > 0


def test_failed_step_is_a_fault_and_plans_wait_for_resume(
    start: Start, scheduler: FakeScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    """One bad step must not kill the worker, and what was planned upon it must not run."""
    start()
    scheduler.configure()
    scheduler.receive("ready")
    for step_id, token in ((1, 1), (2, 13), (3, 3)):
        scheduler.send_plan(make_plan(step_id, token_ids=[token]))
    assert scheduler.receive_result().step_id == 1
    fault = scheduler.receive("fault").fault
    assert (fault.step_id, fault.error) == (2, "RuntimeError: thirteen")
    assert not fault.is_fatal
    scheduler.send_plan(make_plan(4, token_ids=[4]))
    scheduler.send(resume=link_pb2.Resume(next_step_id=5))
    scheduler.send_plan(make_plan(5, token_ids=[5]))
    assert scheduler.receive_result().step_id == 5  # 3 and 4 were discarded
    assert "Traceback" in caplog.text


def test_lost_plan_is_a_fault_that_names_both_steps(start: Start, scheduler: FakeScheduler) -> None:
    """Who reads the log must see what was missing."""
    start()
    scheduler.configure()
    scheduler.receive("ready")
    scheduler.send_plan(make_plan(1))
    scheduler.receive("step_result")
    scheduler.send_plan(make_plan(3))
    fault = scheduler.receive("fault").fault
    assert (fault.step_id, fault.error) == (3, "received step 3, expected 2")


@pytest.mark.parametrize(
    ("error", "is_fatal", "code"),
    [
        (ValueError("gpt-odd is not supported: no attention calls"), True, 2),
        (MemoryError("the pool needs 9 GiB; 1 GiB is free"), True, 2),
        (OSError("no such file:\n  a table\n  below it"), True, 2),
        (KeyError("a bug"), False, 1),
    ],
)
def test_failed_load_is_told_and_ends_the_worker(
    start: Start,
    scheduler: FakeScheduler,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    is_fatal: bool,
    code: int,
) -> None:
    """The reason must reach the scheduler's user, and systemd must know whether to restart."""
    caplog.set_level(logging.INFO)

    def build(configure: link_pb2.Configure, progress: Progress) -> FakeRunner:
        raise error

    serving = start(build)
    scheduler.configure(model="some/model")
    fault = scheduler.receive("fault").fault
    assert serving.join() == code
    assert (fault.step_id, fault.is_fatal) == (-1, is_fatal)
    assert fault.error.startswith("cannot load 'some/model': ")
    assert " ".join(str(error).split()) in fault.error  # one line
    assert ("Traceback" in caplog.text) == (code == 1)  # only for what nobody expects


def test_loading_shows_in_heartbeats_and_log(
    start: Start, scheduler: FakeScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    """A long load must look like one, from both ends."""
    caplog.set_level(logging.INFO)
    seen = threading.Event()

    def build(configure: link_pb2.Configure, progress: Progress) -> FakeRunner:
        for percent in range(31):
            progress("reading weights", percent / 100)
        assert seen.wait(20)
        return FakeRunner()

    start(build)
    scheduler.configure(model="tiny")
    beat = scheduler.receive("heartbeat").heartbeat
    while beat.progress != 0.3:
        beat = scheduler.receive("heartbeat").heartbeat
    assert beat.busy == "loading"
    seen.set()
    scheduler.receive("ready")
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if line.startswith("reading")] == [
        "reading weights: 0 %",
        "reading weights: 25 %",
    ]


def test_new_scheduler_keeps_the_model_unless_it_wants_another(
    start: Start, scheduler: FakeScheduler, address: str
) -> None:
    """Loading takes minutes; and two models at once may not fit."""
    built: list[weakref.ref[FakeRunner]] = []

    def build(configure: link_pb2.Configure, progress: Progress) -> FakeRunner:
        assert all(runner() is None for runner in built), "the old runner is still in memory"
        runner = FakeRunner(num_chunks=len(built))
        built.append(weakref.ref(runner))
        return runner

    start(build)
    scheduler.configure(model="one")
    assert scheduler.receive("ready").ready.num_chunks == 0
    scheduler.close()

    second = FakeScheduler(address, boot_id=8)
    second.configure(model="one")
    assert second.receive("ready").ready.num_chunks == 0
    second.send_plan(make_plan(1, token_ids=[1]))  # a new session: numbered from anywhere
    assert second.receive_result().step_id == 1
    second.close()

    third = FakeScheduler(address, boot_id=9)
    third.configure(model="two")
    assert third.receive("ready").ready.num_chunks == 1
    third.close()


def test_failed_device_ends_the_worker(
    start: Start, scheduler: FakeScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    """After an asynchronous device error nothing computed there is right: a new process must
    begin, and the results before the failure still count."""
    serving = start()
    scheduler.configure()
    scheduler.receive("ready")
    for step_id, token in ((1, 1), (2, 65), (3, 3)):
        scheduler.send_plan(make_plan(step_id, token_ids=[token]))
    assert scheduler.receive_result().step_id == 1
    assert "illegal memory access" in scheduler.receive("bye").bye.reason
    assert serving.join() == 1
    assert "a launched step failed" in caplog.text


def test_device_that_fails_while_a_step_is_launched_ends_the_worker(
    start: Start, scheduler: FakeScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    """Told as a mere fault, it would fail every later step as well, request after request."""
    serving = start()
    scheduler.configure()
    scheduler.receive("ready")
    scheduler.send_plan(make_plan(1, token_ids=[14]))
    assert serving.join() == 1
    assert "step 1 failed: fourteen" in caplog.text
