"""Workers that come, go, stand still and talk nonsense, as the engine sees them."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from protos import link_pb2
from protos.plan import StepResult
from scheduler_svc.engine.worker_link import WorkerMessage
from scheduler_svc.engine.worker_session import FREE_TRIES, MAX_LOADING
from tests.support.engine_harness import Bench, right

PROMPT = [1, 2, 3]


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def worker(bench: Bench) -> str:
    bench.turn()
    return bench.engine.status.worker


def say(bench: Bench, boot_id: int, **message: object) -> None:
    """A worker besides the one that the link plays."""
    envelope = link_pb2.Envelope(worker_boot_id=boot_id, **message)  # type: ignore[arg-type]
    bench.link.on_message(WorkerMessage(envelope))


def hello(bench: Bench, boot_id: int, is_standby: bool = False) -> None:
    say(bench, boot_id, hello=link_pb2.Hello(host="h", pid=boot_id, is_standby=is_standby))


def last_configure(bench: Bench) -> int:
    """The worker that was configured last."""
    configures = [m for m in bench.link.sent if m.WhichOneof("message") == "configure"]
    return configures[-1].worker_boot_id


def serve_right(bench: Bench, request_id: str = "a") -> None:
    bench.serve()
    assert bench.tokens(request_id) == right(PROMPT, 4)
    bench.end(request_id)


# Results

WRONG: dict[str, Callable[[StepResult], StepResult]] = {
    "token 50 is outside": lambda r: replace(r, token_ids=int32(50)),
    "token -1 is outside": lambda r: replace(r, token_ids=int32(-1)),
    "token 2147483647 is": lambda r: replace(r, token_ids=int32(2**31 - 1)),
    "0 tokens for 1": lambda r: replace(r, token_ids=int32()),
    "2 tokens for 1": lambda r: replace(r, token_ids=int32(1, 2)),
    "2 as a verdict": lambda r: replace(r, is_finite=int32(2)),
    "-1 as a verdict": lambda r: replace(r, is_finite=int32(-1)),
    "0 verdicts on 1": lambda r: replace(r, is_finite=int32()),
    "device_microseconds is -5": lambda r: replace(r, device_microseconds=-5),
    "queue_microseconds is 9223": lambda r: replace(r, queue_microseconds=2**63 - 1),
    "step 7 came where 0": lambda r: replace(r, step_id=7),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_result_ends_the_session_and_no_request(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One value out of range ends the scheduler, or reaches a client as a token."""
    bench = Bench()
    bench.connect()
    bench.submit("a", PROMPT)
    bench.turn()
    bench.link.say_result(WRONG[what](bench.link.worker.step(bench.link.plans.popleft())))
    assert worker(bench) == "connecting"
    assert what in caplog.text
    assert bench.link.is_dropped
    bench.connect()
    serve_right(bench)


def test_a_result_that_comes_twice_counts_once() -> None:
    """A repeated token, or a healthy worker lost for a harmless repetition."""
    bench = Bench()
    bench.connect()
    bench.submit("a", PROMPT)
    bench.turn()
    result = bench.link.worker.step(bench.link.plans.popleft())
    bench.link.worker.finish(0)
    for _ in range(3):
        bench.link.say_result(result)
    serve_right(bench)
    assert bench.engine.status.is_ready


def test_a_result_of_a_step_that_nobody_planned_ends_the_session() -> None:
    """An idle scheduler would take it for late and trust the worker on."""
    bench = Bench()
    bench.connect()
    bench.submit("a", PROMPT)
    bench.turn()
    result = bench.link.worker.step(bench.link.plans.popleft())
    bench.link.worker.finish(0)
    bench.link.say_result(result)
    serve_right(bench)
    bench.link.say_result(replace(result, step_id=99))
    assert worker(bench) == "connecting"


@pytest.mark.parametrize("depth", [1, 2])
def test_an_error_of_the_link_ends_the_session(depth: int) -> None:
    """A result that could not be read is waited for for ever."""
    bench = Bench(depth)
    bench.connect()
    bench.submit("a", PROMPT)
    bench.turn()
    envelope = link_pb2.Envelope(worker_boot_id=bench.link.num_workers)
    bench.link.on_message(WorkerMessage(envelope, error="a message cannot be read"))
    assert worker(bench) == "connecting"
    bench.connect()
    serve_right(bench)


@pytest.mark.parametrize("step_id", [-1, 5, -(2**63), 2**63 - 1])
def test_a_fault_of_no_step_in_flight_ends_the_session(step_id: int) -> None:
    """Taken for a step's, it would reset everybody, again and again."""
    bench = Bench()
    bench.connect()
    bench.submit("a", PROMPT)
    bench.turn()
    bench.link.say(fault=link_pb2.Fault(step_id=step_id, error="x" * 10**6))
    assert worker(bench) == "connecting"
    bench.connect()
    serve_right(bench)


@pytest.mark.parametrize(
    "message",
    [
        {"ready": link_pb2.Ready()},
        {"configure": link_pb2.Configure()},
        {"step_plan": link_pb2.StepPlan()},
        {"mask": link_pb2.Mask()},
        {"resume": link_pb2.Resume()},
        {"fault": link_pb2.Fault(error="the model is refused", is_fatal=True)},
        {},
    ],
    ids=str,
)
def test_what_no_worker_says_while_it_serves_ends_the_session(message: dict[str, object]) -> None:
    """A second Ready would empty the pool under steps that are running; nobody must fail of it."""
    bench = Bench()
    bench.connect()
    bench.submit("a", PROMPT)
    bench.turn()
    bench.link.say(**message)
    assert worker(bench) == "connecting"
    bench.connect()
    serve_right(bench)


def test_sessions_that_end_one_after_the_other_come_to_a_pause() -> None:
    """A worker that says Hello at once after each failure keeps the scheduler busy for ever."""
    bench = Bench()
    for _ in range(FREE_TRIES + 1):
        bench.link.hello()
        bench.link.ready(page_size=0)
    bench.turn()
    count = len(bench.link.sent)
    for _ in range(1000):
        hello(bench, 77)
    bench.turn()
    assert len(bench.link.sent) == count, "the storm was answered"
    bench.now += 1
    bench.connect()
    bench.submit("a", PROMPT)
    serve_right(bench)


# Who serves


def test_a_newcomer_that_comes_and_goes_costs_nothing() -> None:
    """The healthy worker was dismissed for one that never was ready."""
    bench = Bench()
    bench.connect()
    bench.submit("a", PROMPT)
    bench.step()
    hello(bench, 77)
    bench.step()
    assert last_configure(bench) == 77
    assert bench.engine.status.is_ready
    say(bench, 77, bye=link_pb2.Bye(reason="Ctrl-C"))
    serve_right(bench)
    assert bench.end("a").preemptions == 0
    for fault in (True, False):
        hello(bench, 78)
        say(bench, 78, fault=link_pb2.Fault(error="no such model", is_fatal=fault))
        assert worker(bench) == "ready"
        assert bench.engine.status.fatal_error is None


def test_a_newcomer_takes_over_when_it_is_ready() -> None:
    """The present one goes on meanwhile; and if it dies, the newcomer is there."""
    bench = Bench()
    hello(bench, 77)  # older, but slower to load
    bench.connect()
    bench.submit("a", PROMPT)
    bench.step()
    old = bench.link.num_workers
    bench.link.hello()
    bench.turn()
    assert bench.engine.status.is_ready
    assert bench.engine._session._serving.boot_id == old
    bench.link.ready()
    bench.turn()
    assert bench.engine._session._serving.boot_id == bench.link.num_workers
    assert not bench.link.is_dropped
    say(bench, 77, ready=link_pb2.Ready(page_size=0))
    serve_right(bench)

    bench.submit("b", PROMPT)
    hello(bench, 78)
    bench.step()
    bench.link.say(bye=link_pb2.Bye(reason="killed"))
    assert worker(bench) == "loading"


def test_who_said_hello_last_serves_whoever_was_ready_first() -> None:
    """Two that start together would take the requests from each other twice."""
    bench = Bench()
    hello(bench, 77)
    bench.connect()
    newest = bench.link.num_workers
    ready = bench.link.ready_message()
    say(bench, 77, ready=ready)
    bench.turn()
    assert bench.engine._session._serving.boot_id == newest
    assert 77 not in bench.engine._session._loading


def test_one_that_stands_by_counts_only_while_nobody_is_there() -> None:
    """Two workers that each come back after every Bye take turns for ever; and one that never
    comes back leaves the service without a worker."""
    bench = Bench()
    bench.connect()
    count = len(bench.link.sent)
    hello(bench, 77, is_standby=True)
    assert worker(bench) == "ready"
    assert len(bench.link.sent) == count
    bench.link.say(bye=link_pb2.Bye(reason="Ctrl-C"))
    assert worker(bench) == "connecting"
    hello(bench, 77, is_standby=True)
    assert worker(bench) == "loading"
    assert last_configure(bench) == 77


def test_no_more_workers_load_than_there_is_room_for() -> None:
    """Hellos under ever new names fill the memory."""
    bench = Bench()
    for boot_id in range(100, 200):
        hello(bench, boot_id)
    assert worker(bench) == "loading"
    assert len(bench.engine._session._loading) == MAX_LOADING
    bench.now += 6  # none of them beats its heart
    assert worker(bench) == "connecting"


# The watchdog


def beat(bench: Bench, busy: str = "step", finished: int = -1) -> None:
    heartbeat = link_pb2.Heartbeat(busy=busy, last_finished_step=finished, progress=float("nan"))
    bench.link.say(heartbeat=heartbeat)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_without_progress_ends_the_session(depth: int) -> None:
    """A worker that hangs in a step goes on beating its heart."""
    bench = Bench(depth, step_timeout=20.0)
    bench.connect()
    bench.submit("a", PROMPT)
    bench.step()
    for _ in range(6):
        beat(bench)
        assert worker(bench) == "ready"
        bench.now += 4
    beat(bench)
    assert worker(bench) == "connecting"
    bench.connect()
    serve_right(bench)


def test_slow_steps_idle_times_and_compiling_are_no_hang() -> None:
    """A healthy worker is lost, with everybody's KV."""
    bench = Bench(step_timeout=20.0)
    bench.connect()
    for _ in range(20):  # idle
        beat(bench, "idle")
        bench.turn()
        bench.now += 4
    bench.submit("a", PROMPT)
    bench.turn()
    for _ in range(20):
        beat(bench, "compiling")
        bench.turn()
        assert bench.engine.status.busy == "compiling"
        bench.now += 4
    bench.link.answer()
    for _ in range(3):  # 16 s each
        for _ in range(4):
            beat(bench)
            bench.turn()
            bench.now += 4
        bench.link.answer()
    bench.turn()
    serve_right(bench)
    assert [s.worker for s in bench.statuses] == ["loading", "ready"]


def test_a_lost_result_is_noticed_by_the_heartbeats(caplog: pytest.LogCaptureFixture) -> None:
    """With one plan in flight nothing else ever comes."""
    bench = Bench()
    bench.connect()
    bench.submit("a", PROMPT)
    bench.step(2)
    bench.link.plans.clear()
    beat(bench, "idle", finished=1)
    beat(bench, "idle", finished=1)
    beat(bench, "idle", finished=2)
    assert worker(bench) == "ready"
    beat(bench, "idle", finished=2)
    assert worker(bench) == "connecting"
    assert "it reported step 2 as finished, but sent no result" in caplog.text
    bench.connect()
    serve_right(bench)


def test_loading_may_take_long_and_says_how_far_it_is() -> None:
    """A download is no hang; whoever waits sees what for."""
    bench = Bench(step_timeout=20.0)
    bench.link.hello()
    for _ in range(100):
        bench.link.say(heartbeat=link_pb2.Heartbeat(busy="loading", progress=0.25))
        assert worker(bench) == "loading"
        bench.now += 4
    assert bench.engine.status.busy == "loading 25%"


def test_a_link_whose_thread_dies_ends_the_engine() -> None:
    """Nothing is heard of any worker after that; only a new process helps."""
    deaths: list[Callable[[BaseException], None]] = []
    crashes: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    bench = Bench()
    bench.link.start = lambda on_message, on_death: deaths.append(on_death)
    bench.engine.start(crashes.put)
    deaths[0](OSError("no such socket"))
    assert "the worker link's thread died: no such socket" in str(crashes.get(timeout=20))
    bench.engine.stop()
