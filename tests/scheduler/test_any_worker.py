"""A worker that sends anything at all, then one that is well: real engine, real sockets.

What cannot be told from the truth is left out: another token of the vocabulary, a row called not
finite, a fault of a step in flight, a model that is refused. So is whom a worker's silence or death
is blamed on (test_engine_faults.py): here its nonsense must not cost any request its answer.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq

from protos import link_pb2
from protos.link import PROTOCOL
from protos.plan import StepPlan, StepResult, decode_plan, encode_result
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.request import NewRequest, Sampling
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.events import Delta, Event, Failed, Finished, Submission
from scheduler_svc.engine.worker_link import WorkerLink
from tests.support.engine_harness import GEOMETRY, right
from tests.support.memory_link import MemoryLink
from tests.support.shadow_worker import ShadowWorker
from worker.process.link import LinkClosed, SchedulerLink
from worker.process.session import SessionEnded

NUM_ROWS, VOCAB_SIZE = 4, 50
PATIENCE = 60.0
BOOT_ID = 0xA1
ODD = (-(2**31), -(2**31) + 1, -7, -1, 50, 51, 4096, 2**31 - 1)
SENSELESS = {
    "vocab_size": (0, -1, 2**31 - 1),
    "page_size": (0, -4),
    "num_chunks": (0, -1, 2, 2**31 - 1),
    "max_model_len": (0, -32),
    "num_swap_chunks": (-1, 2**31 - 1),
    "chunk_bytes": (0, -1),
}


def ready_message() -> link_pb2.Ready:
    return MemoryLink(GEOMETRY, NUM_ROWS, VOCAB_SIZE).ready_message()


class WildWorker:
    """Computes rightly, but what it says of that is its mood's."""

    def __init__(self, address: str, rng: random.Random) -> None:
        self.address = address
        self.rng = rng
        self.context = zmq.Context()
        self.said: list[str] = []
        self.begin()

    def begin(self) -> None:
        """A new life, or a new session of the old one."""
        self.boot_id = self.rng.getrandbits(63) | 1
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(self.address)
        self.shadow = ShadowWorker(GEOMETRY, NUM_ROWS, VOCAB_SIZE, garbage_seed=1)
        self.hello()

    def say(self, *frames: bytes, **message: object) -> None:
        ids = {"scheduler_boot_id": BOOT_ID, "worker_boot_id": self.boot_id}
        if self.rng.random() < 0.02:
            ids[self.rng.choice(list(ids))] = self.rng.getrandbits(64)
        head = link_pb2.Envelope(**(ids | message)).SerializeToString()  # type: ignore[arg-type]
        self.send(head, *frames)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def hello(self, protocol: int = PROTOCOL) -> None:
        self.say(hello=link_pb2.Hello(protocol=protocol, host="wild", pid=1))

    def live(self, num_acts: int) -> None:
        for _ in range(num_acts):
            if not self.socket.poll(self.rng.choice((1, 5, 50))):
                self.act("idle")
                continue
            head, *buffers = self.socket.recv_multipart()
            envelope = link_pb2.Envelope.FromString(head)
            kind = envelope.WhichOneof("message")
            if kind == "configure":
                self.answer_configure()
            elif kind == "bye":
                self.socket.close()
                self.begin()
            elif kind == "step_plan":
                header = envelope.step_plan
                plan = decode_plan(header.step_id, False, header.counts, buffers[0])
                self.answer_plan(plan)

    def answer_configure(self) -> None:
        ready = ready_message()
        if self.rng.random() < 0.3:
            name = self.rng.choice(list(SENSELESS))
            setattr(ready, name, self.rng.choice(SENSELESS[name]))
        elif self.rng.random() < 0.1:
            ready.groups[0].layers.extend([0, 0])
        self.said.append(f"ready {ready.ListFields()[3:]}")
        self.say(ready=ready)

    def answer_plan(self, plan: StepPlan) -> None:
        try:
            result = self.shadow.step(plan)
            self.shadow.finish(plan.step_id)
        except AssertionError:
            return  # of a session that the scheduler has ended by now
        if self.rng.random() < 0.5:
            self.send_result(result)
        else:
            self.act("wrong", result)

    def send_result(self, result: StepResult, cut: int = 0, grow: int = 0) -> None:
        counts, buffer = encode_result(result)
        header = link_pb2.StepResult(
            step_id=result.step_id,
            counts=counts,
            device_microseconds=result.device_microseconds,
            queue_microseconds=result.queue_microseconds,
        )
        self.say(buffer[: len(buffer) - cut] + bytes(grow), step_result=header)

    def act(self, mood: str, result: StepResult | None = None) -> None:
        rng = self.rng
        acts = IDLE if result is None else WRONG
        name = rng.choice(acts)
        self.said.append(f"{mood}: {name}")
        odd, big = rng.choice(ODD), rng.choice((-(2**63), -1, 0, 1, 2**63 - 1))
        match name:
            case "noise":
                self.send(*(rng.randbytes(rng.choice((0, 1, 9, 200))) for _ in range(3)))
            case "empty frame":
                self.send(b"")
            case "mutated":
                beat = link_pb2.Envelope(
                    scheduler_boot_id=BOOT_ID,
                    worker_boot_id=self.boot_id,
                    heartbeat=link_pb2.Heartbeat(busy="idle", last_finished_step=big),
                )
                data = bytearray(beat.SerializeToString())
                data[rng.randrange(len(data))] = rng.randrange(256)
                self.send(bytes(data))
            case "heartbeat":
                words = ("idle", "loading", "step", "compiling", "x" * 1000, "")
                beat = link_pb2.Heartbeat(
                    busy=rng.choice(words), last_finished_step=big, busy_step=big,
                    progress=rng.choice((float("nan"), float("inf"), -1.0, 0.5)),
                )  # fmt: skip
                self.say(heartbeat=beat)
            case "hello":
                self.hello(rng.choice((PROTOCOL, PROTOCOL, 0, -1)))
            case "another hello":
                self.boot_id += 1
                self.shadow = ShadowWorker(GEOMETRY, NUM_ROWS, VOCAB_SIZE, garbage_seed=1)
                self.hello()
            case "ready":
                self.say(ready=link_pb2.Ready(page_size=odd, num_chunks=odd))
            case "fault":
                self.say(fault=link_pb2.Fault(step_id=rng.choice((-1, -2, 2**40)), error="?"))
            case "theirs":
                self.say(**{rng.choice(("resume", "mask", "step_plan", "configure")): {}})
            case "bye":
                self.say(bye=link_pb2.Bye(reason="\n" * rng.randrange(5)))
            case "gone":
                self.socket.close()
                self.begin()
            case "withheld":
                pass
        if result is None:
            return
        match name:
            case "cut":
                self.send_result(result, cut=4)
            case "grown":
                self.send_result(result, grow=rng.choice((1, 4)))
            case "no buffer":
                self.say(step_result=link_pb2.StepResult(step_id=result.step_id, counts=[1] * 4))
            case "counts":
                counts = [rng.choice((*ODD, 0, 1, 2)) for _ in range(rng.randrange(6))]
                header = link_pb2.StepResult(step_id=result.step_id, counts=counts)
                self.say(rng.randbytes(4 * rng.randrange(4)), step_result=header)
            case "twice":
                self.send_result(result)
                self.send_result(result)
            case "other step":
                self.send_result(replace(result, step_id=result.step_id + rng.choice((1, 2**40))))
            case "time":
                self.send_result(replace(result, device_microseconds=rng.choice((-1, 2**62))))
            case "verdict":
                verdicts = np.full(len(result.is_finite), rng.choice((2, -1, 2**30)), np.int32)
                self.send_result(replace(result, is_finite=verdicts))
            case "tokens":
                tokens = np.full(len(result.token_ids), odd, np.int32)
                if len(tokens):
                    self.send_result(replace(result, token_ids=tokens))
            case "more":
                tokens = np.append(result.token_ids, np.int32(0))
                self.send_result(replace(result, token_ids=tokens))


IDLE = (
    "noise", "empty frame", "mutated", "heartbeat", "heartbeat", "hello", "another hello", "ready",
    "fault", "theirs", "bye", "gone", "withheld", "withheld",
)  # fmt: skip
WRONG = (
    *IDLE, "cut", "grown", "no buffer", "counts", "twice", "other step", "time", "verdict",
    "tokens", "more", "twice", "tokens",
)  # fmt: skip


@pytest.fixture
def healthy() -> Iterator[queue.SimpleQueue[str]]:
    """A worker that is well, at the address that is put into the queue."""
    addresses: queue.SimpleQueue[str] = queue.SimpleQueue()
    links: list[SchedulerLink] = []

    def work() -> None:
        address = addresses.get()
        if not address:
            return
        links.append(SchedulerLink(address, link_pb2.Hello(protocol=PROTOCOL, host="well", pid=2)))
        try:
            while True:
                session = links[0].accept()
                shadow = ShadowWorker(GEOMETRY, NUM_ROWS, VOCAB_SIZE, garbage_seed=2)
                session.send_ready(ready_message())
                try:
                    while True:
                        plan = session.receive().plan
                        result = shadow.step(plan)
                        shadow.finish(plan.step_id)
                        session.send_result(result)
                except SessionEnded:
                    pass
        except LinkClosed:
            pass

    thread = threading.Thread(target=work)
    thread.start()
    yield addresses
    addresses.put("")
    for link in links:
        link.close("the test is over")
    thread.join()


def outcomes(events: list[Event]) -> dict[str, Event]:
    return {e.request_id: e for e in list(events) if isinstance(e, Finished | Failed)}


def check_seed(seed: int, depth: int, address: str, healthy: queue.SimpleQueue[str]) -> None:
    rng = random.Random(seed)
    events: list[Event] = []
    crashes: list[BaseException] = []
    engine = Engine(
        Limits(16, NUM_ROWS, max_plans_in_flight=depth),
        link_pb2.Configure(page_size=GEOMETRY.page_size),
        WorkerLink(address, BOOT_ID),
        heartbeat_timeout=2.0,
        step_timeout=0.5,
    )
    engine.attach(events.extend, lambda status: None)
    engine.start(crashes.append)
    prompts = {str(i): [rng.randrange(50) for _ in range(rng.randint(1, 20))] for i in range(8)}
    for request_id, prompt in prompts.items():
        engine.submit(Submission(NewRequest(request_id, prompt, 8, Sampling(0.0))))
    wild = WildWorker(address, rng)
    try:
        wild.live(150)
        wild.context.destroy(linger=0)
        healthy.put(address)
        deadline = time.monotonic() + PATIENCE
        while len(outcomes(events)) < len(prompts) and not crashes:
            assert time.monotonic() < deadline, (engine.status, wild.said)
            time.sleep(0.02)
        assert not crashes, (crashes, wild.said)
    finally:
        wild.context.destroy(linger=0)
        engine.stop()
    for request_id, prompt in prompts.items():
        assert isinstance(outcomes(events)[request_id], Finished), (outcomes(events), wild.said)
        deltas = [e for e in events if isinstance(e, Delta) and e.request_id == request_id]
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tokens == right(prompt, 8), wild.said


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    for tries in ("TRIES_IF_FAULTY", "TRIES_IF_LOST", "TRIES_IF_REPLACED"):
        monkeypatch.setattr(f"scheduler_svc.engine.worker_session.{tries}", 1000)
    monkeypatch.setattr("scheduler_svc.engine.worker_session.LONGEST_PAUSE", 0.1)
    monkeypatch.setattr("worker.process.link.STANDBY_SECONDS", 0.1)


@pytest.mark.usefixtures("brisk")
@pytest.mark.parametrize(("seed", "depth"), [(1, 1), (2, 2)])
def test_whatever_a_worker_sends_every_request_ends_right(
    tmp_path: Path, healthy: queue.SimpleQueue[str], seed: int, depth: int
) -> None:
    """One message in a thousand takes the scheduler down, or leaves a request waiting for ever."""
    check_seed(seed, depth, f"ipc://{tmp_path}/w", healthy)


@pytest.mark.slow
@pytest.mark.usefixtures("brisk")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(100, 130))
def test_whatever_many_workers_send_every_request_ends_right(
    tmp_path: Path, healthy: queue.SimpleQueue[str], seed: int, depth: int
) -> None:
    """The same, longer."""
    check_seed(seed, depth, f"ipc://{tmp_path}/w", healthy)
