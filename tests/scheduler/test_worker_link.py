"""The scheduler's socket against real DEALERs that behave and misbehave."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
import zmq.auth

from protos import link_pb2
from protos.plan import StepResult, decode_plan, encode_result
from scheduler_svc.core.commit import commit
from scheduler_svc.core.decide import decide
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.pack import pack
from scheduler_svc.core.request import NewRequest
from scheduler_svc.core.state import State
from scheduler_svc.worker_link import WorkerLink, WorkerMessage
from tests.sim.workload import Setup

BOOT_ID = 77
PATIENCE_MS = 10_000


class Dealer:
    """A worker's end of the link, by hand."""

    def __init__(self, address: str, boot_id: int) -> None:
        self.boot_id = boot_id
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.address = address

    def connect(self) -> Dealer:
        self.socket.connect(self.address)
        return self

    def say(self, *, to: int = BOOT_ID, buffer: bytes | None = None, **message: object) -> None:
        envelope = link_pb2.Envelope(scheduler_boot_id=to, worker_boot_id=self.boot_id, **message)  # type: ignore[arg-type]
        frames = [envelope.SerializeToString()]
        self.socket.send_multipart(frames if buffer is None else [*frames, buffer])

    def hello(self, protocol: int = 1) -> None:
        self.say(to=0, hello=link_pb2.Hello(protocol=protocol, host="h", pid=1, version="0"))

    def hear(self, kind: str) -> tuple[link_pb2.Envelope, list[bytes]]:
        """The next message of a kind; others (heartbeats, mostly) are skipped."""
        while self.socket.poll(PATIENCE_MS):
            head, *buffers = self.socket.recv_multipart()
            envelope = link_pb2.Envelope.FromString(head)
            if envelope.WhichOneof("message") == kind:
                assert envelope.scheduler_boot_id == BOOT_ID
                assert envelope.worker_boot_id == self.boot_id
                return envelope, buffers
        raise AssertionError(f"no {kind} came")

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def heard() -> queue.SimpleQueue[WorkerMessage]:
    return queue.SimpleQueue()


@pytest.fixture
def link(tmp_path: Path, heard: queue.SimpleQueue[WorkerMessage]) -> Iterator[WorkerLink]:
    link = WorkerLink(f"ipc://{tmp_path}/link", BOOT_ID)
    link.start(heard.put)
    yield link
    link.stop()


def next_kind(heard: queue.SimpleQueue[WorkerMessage]) -> str | None:
    return heard.get(timeout=PATIENCE_MS / 1000).envelope.WhichOneof("message")


def test_a_plan_and_its_result_cross_unchanged(
    link: WorkerLink, heard: queue.SimpleQueue[WorkerMessage]
) -> None:
    """An array is cut, shifted or of another dtype on the other side."""
    dealer = Dealer(link.address, 5).connect()
    dealer.hello()
    assert next_kind(heard) == "hello"
    setup = Setup()
    state = State(Limits(64, 8), setup.geometry())
    state.submit(NewRequest("a", list(range(9)), 4))
    step = commit(state, decide(state))
    assert step is not None
    plan = pack(state, step)
    link.send(link_pb2.Envelope(), plan)
    envelope, [buffer] = dealer.hear("step_plan")
    header = envelope.step_plan
    got = decode_plan(header.step_id, header.awaits_mask, header.counts, buffer)
    assert got.token_ids.tolist() == list(range(9))
    assert got.blocks.tolist() == plan.blocks.tolist()
    assert got.u.tolist() == plan.u.tolist()

    none = np.zeros(0, np.int32)
    result = StepResult(
        0,
        12,
        3,
        np.array([41], np.int32),
        np.ones(1, np.int32),
        np.zeros(1, np.float32),
        np.zeros(1, np.int32),
        np.zeros(2, np.int32),
        none,
        np.zeros(0, np.float32),
    )
    counts, payload = encode_result(result)
    dealer.say(
        step_result=link_pb2.StepResult(
            step_id=0, counts=counts, device_microseconds=12, queue_microseconds=3
        ),
        buffer=payload,
    )
    message = heard.get(timeout=10)
    assert message.result is not None
    assert message.result.token_ids.tolist() == [41]
    assert message.result.device_microseconds == 12
    dealer.close()


def test_messages_of_another_session_are_dropped(
    link: WorkerLink, heard: queue.SimpleQueue[WorkerMessage]
) -> None:
    """A result that a dead worker left in the pipe is taken for one of the new worker."""
    old, new = Dealer(link.address, 5).connect(), Dealer(link.address, 6).connect()
    old.hello()
    assert next_kind(heard) == "hello"
    new.hello()
    assert next_kind(heard) == "hello"
    farewell, _ = old.hear("bye")
    assert "took over" in farewell.bye.reason
    old.say(ready=link_pb2.Ready())  # not the session's worker any more
    new.say(to=BOOT_ID - 1, ready=link_pb2.Ready())  # meant for a former scheduler
    new.socket.send_multipart([b"\xff\xff\xff"])  # no message at all
    new.say(step_result=link_pb2.StepResult(step_id=1, counts=[1]), buffer=b"")  # cut off
    new.say(heartbeat=link_pb2.Heartbeat(busy="idle"))
    assert next_kind(heard) == "heartbeat"
    assert heard.empty()
    old.close()
    new.close()


def test_a_dropped_session_hears_nothing_until_it_says_hello(
    link: WorkerLink, heard: queue.SimpleQueue[WorkerMessage]
) -> None:
    """A worker that was given up goes on in a session that no longer exists."""
    dealer = Dealer(link.address, 5).connect()
    dealer.hello()
    assert next_kind(heard) == "hello"
    dealer.hear("heartbeat")  # both ways, without being asked
    link.drop(dealer.boot_id + 1)  # of a session that has been replaced: nothing happens
    dealer.hear("heartbeat")
    link.drop(dealer.boot_id)
    link.send(link_pb2.Envelope(configure=link_pb2.Configure()))
    dealer.hello()
    assert next_kind(heard) == "hello"
    link.send(link_pb2.Envelope(configure=link_pb2.Configure(model="second")))
    assert dealer.hear("configure")[0].configure.model == "second"
    dealer.close()


def test_another_protocol_is_told_why_it_is_refused(
    link: WorkerLink, heard: queue.SimpleQueue[WorkerMessage]
) -> None:
    """Two versions that misread each other's arrays."""
    dealer = Dealer(link.address, 5).connect()
    dealer.hello(protocol=99)
    assert "protocol 99" in dealer.hear("bye")[0].bye.reason
    assert heard.empty()
    dealer.close()


def test_the_socket_file_is_private(link: WorkerLink) -> None:
    """Another user of the machine reads every prompt."""
    path = Path(link.address.removeprefix("ipc://"))
    assert path.stat().st_mode & 0o077 == 0


def test_an_address_that_cannot_be_bound_is_named(tmp_path: Path) -> None:
    """The process hangs without a worker and nobody knows why."""
    link = WorkerLink(f"ipc://{tmp_path}/missing/link", BOOT_ID)
    with pytest.raises(OSError, match=r"worker_address ipc://.*/missing/link cannot be bound"):
        link.start(lambda message: None)
    link.stop()


def test_curve_lets_in_only_known_workers(tmp_path: Path) -> None:
    """Whoever reaches the TCP port reads prompts and answers for the worker."""
    keys, known = tmp_path / "keys", tmp_path / "known"
    keys.mkdir()
    known.mkdir()
    server_public, server_secret = zmq.auth.create_certificates(keys, "scheduler")
    worker_public, worker_secret = zmq.auth.create_certificates(keys, "worker")
    _, stranger_secret = zmq.auth.create_certificates(keys, "stranger")
    (known / "worker.key").write_bytes(Path(worker_public).read_bytes())
    heard: queue.SimpleQueue[WorkerMessage] = queue.SimpleQueue()
    link = WorkerLink(f"ipc://{tmp_path}/link", BOOT_ID, Path(server_secret), known)
    link.start(heard.put)
    dealers = []
    for boot_id, secret in ((8, stranger_secret), (5, worker_secret)):
        dealer = Dealer(link.address, boot_id)
        dealer.socket.curve_publickey, dealer.socket.curve_secretkey = zmq.auth.load_certificate(
            secret
        )
        dealer.socket.curve_serverkey = zmq.auth.load_certificate(server_public)[0]
        dealers.append(dealer.connect())
        dealer.hello()
    assert heard.get(timeout=10).envelope.worker_boot_id == 5
    assert heard.empty()
    link.stop()
    for dealer in dealers:
        dealer.close()
