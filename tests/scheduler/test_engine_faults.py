"""The engine when steps fail, workers die in them, or nothing can be planned: who pays for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protos import link_pb2
from protos.plan import StepPlan
from scheduler_svc.core.limits import FULL_ATTENTION, Geometry, GroupGeometry
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine.events import Failed
from scheduler_svc.errors import RequestFailed
from tests.support.engine_harness import Bench, assert_nothing_is_held, right

ROOMY = Geometry(4, 100 + 2, 64, (GroupGeometry(FULL_ATTENTION, 1, 1),), max_model_len=64)


def fault(bench: Bench) -> None:
    bench.link.fault("IndexError: index out of range in self")


def come_back(bench: Bench) -> None:
    bench.turn()
    bench.now += 8  # workers that come and go have to wait
    bench.connect()


def silence(bench: Bench) -> None:
    bench.now += 6
    come_back(bench)


def replacement(bench: Bench) -> None:
    bench.connect()


def failing_device(bench: Bench) -> None:
    bench.link.say(bye=link_pb2.Bye(reason="the device failed: assert", is_failure=True))
    come_back(bench)


def wrong_result(bench: Bench) -> None:
    result = bench.link.worker.step(bench.link.plans.popleft())
    bench.link.say_result(replace(result, is_finite=np.zeros(0, np.int32)))
    come_back(bench)


FAILURES: dict[str, Callable[[Bench], None]] = {
    "fault": fault,
    "silence": silence,
    "replacement": replacement,
    "failing device": failing_device,
    "wrong result": wrong_result,
}


def computes(bench: Bench, request_id: str) -> bool:
    """Whether the oldest plan in flight does."""
    step_id = bench.link.plans[0].step_id
    steps = [step for step in bench.engine._state.in_flight if step.step_id == step_id]
    return any(request.request_id == request_id for step in steps for request in step.requests)


def serve_with_poison(bench: Bench, poison: str, fail: Callable[[Bench], None]) -> int:
    """Until nobody is live; how often it was failed."""
    failures = 0
    for _ in range(1000):
        bench.turn()
        if bench.link.plans and computes(bench, poison):
            failures += 1
            fail(bench)
        elif not bench.link.answer() and not len(bench.engine._answers):
            return failures
    raise AssertionError("nothing gets on")


@pytest.mark.parametrize("fail", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize(("depth", "n"), [(1, 1), (2, 3)])
def test_a_poison_fails_alone_and_by_name(
    fail: Callable[[Bench], None], depth: int, n: int
) -> None:
    """One client's odd request ends everybody's answers, or kills worker after worker."""
    bench = Bench(depth, geometry=ROOMY, num_rows=12, max_batch_tokens=32)
    bench.connect()
    for i in range(8):
        bench.submit(f"healthy{i}", [i, 2, 3], 30)
    bench.step(5)
    bench.submit("poison", [9, 9, 9], 30, n=n)
    failures = serve_with_poison(bench, "poison", fail)
    assert isinstance(bench.error("poison"), RequestFailed)
    assert "request poison: " in str(bench.error("poison"))
    # 2 together, 3 or 4 in halves; alone more often where it is less sure
    assert failures <= (22 if fail is wrong_result else 10)
    for i in range(8):
        assert bench.tokens(f"healthy{i}") == right([i, 2, 3], 30), i
        bench.end(f"healthy{i}")
    assert_nothing_is_held(bench)


def test_the_error_is_the_steps() -> None:
    """Nobody can find out what is wrong with the request."""
    bench = Bench()
    bench.connect()
    bench.submit("poison", [1])
    serve_with_poison(bench, "poison", fault)
    assert str(bench.error("poison")).endswith(
        "request poison: the step that computed it failed: IndexError: index out of range in self"
    )


def test_a_fault_that_names_no_step_does_not_go_on_for_ever() -> None:
    """A worker that fails before it begins a step is asked again without end."""
    bench = Bench()
    bench.connect()
    bench.submit("a", [1, 2, 3])
    bench.submit("b", [4, 5, 6])
    for _ in range(40):
        bench.turn()
        if bench.link.plans:
            bench.link.plans.clear()
            bench.link.say(fault=link_pb2.Fault(step_id=-1, error="out of luck"))
            come_back(bench)
    assert isinstance(bench.error("a"), RequestFailed)
    assert isinstance(bench.error("b"), RequestFailed)


@pytest.mark.parametrize("fail", FAILURES.values(), ids=FAILURES)
def test_the_plan_behind_a_failed_one_is_not_to_blame(fail: Callable[[Bench], None]) -> None:
    """A newcomer is suspected of, or fails by, a step that it was not in."""
    bench = Bench(2, geometry=ROOMY, num_rows=4)
    bench.connect()
    bench.submit("poison", [1, 2, 3], 20)
    bench.turn()
    for turn in range(6):
        bench.submit(f"new{turn}", [turn, 1], 3)
        bench.turn()
        if bench.link.plans and computes(bench, "poison"):
            fail(bench)
    serve_with_poison(bench, "poison", fail)
    assert isinstance(bench.error("poison"), RequestFailed)
    for turn in range(6):
        assert bench.tokens(f"new{turn}") == right([turn, 1], 3)


def test_a_worker_that_is_restarted_on_purpose_blames_nobody() -> None:
    """An operator who restarts the worker a few times fails the answers under way."""
    bench = Bench(2)
    bench.connect()
    bench.submit("a", [1, 2, 3], 5)
    for _ in range(6):
        bench.turn()
        bench.link.say(bye=link_pb2.Bye(reason="the worker was told to stop"))
        come_back(bench)
    bench.serve()
    assert bench.tokens("a") == right([1, 2, 3], 5)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("fail", [fault, silence])
def test_a_worker_that_fails_every_step_fails_each_request_in_the_end(
    fail: Callable[[Bench], None], policy: Any
) -> None:
    """A broken device is tried for ever, and clients wait as long."""
    bench = Bench(2, geometry=ROOMY, policy=policy, num_rows=6)
    bench.connect()
    for i in range(12):
        bench.submit(f"r{i}", [i, 2], 5)
    for _ in range(200):
        bench.turn()
        if bench.link.plans:
            fail(bench)
    failed = [event.request_id for event in bench.events if isinstance(event, Failed)]
    assert sorted(failed) == sorted(f"r{i}" for i in range(12))
    bench.submit("later", [1, 2], 5)  # somebody mended it
    bench.serve()
    assert bench.tokens("later") == right([1, 2], 5)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_cured_by_reset", [True, False])
def test_a_wedge_costs_one_request(
    depth: int,
    is_cured_by_reset: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A bug in who may have which memory ends the service, with every stream."""

    plan = Scheduler.plan

    def wedged(scheduler: Scheduler) -> StepPlan | None:
        family = scheduler.state.requests.get("stuck")
        if family is None or (is_cured_by_reset and family[0].was_wedged):
            return plan(scheduler)
        return None

    bench = Bench(depth, geometry=ROOMY)
    bench.connect()
    bench.submit("stuck", [1, 2, 3], 6, n=2)
    bench.submit("other", [4, 5], 6)
    bench.step(2)
    monkeypatch.setattr(Scheduler, "plan", wedged)
    with caplog.at_level(logging.ERROR):
        bench.serve()
    assert "bug in Chairlift" in caplog.text
    assert "request stuck" in caplog.text
    if is_cured_by_reset:
        assert bench.tokens("stuck") == right([1, 2, 3], 6)
    else:
        assert isinstance(bench.error("stuck"), RequestFailed)
        assert "it cannot be scheduled" in str(bench.error("stuck"))
    assert bench.tokens("other") == right([4, 5], 6)
    assert_nothing_is_held(bench)
