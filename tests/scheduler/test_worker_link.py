"""The scheduler's socket against real DEALERs that behave and misbehave."""

from __future__ import annotations

import os
import queue
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import zmq
import zmq.auth

from protos import link_pb2
from protos.link import PROTOCOL
from protos.plan import RESULT_DIMENSIONS, StepResult, decode_plan, encode_result
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.request import NewRequest
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine.worker_link import WorkerLink, WorkerMessage
from tests.support.simulation import Setup

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

    def hello(self, protocol: int = PROTOCOL) -> None:
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


NOTHING: Final = [0] * len(RESULT_DIMENSIONS)


def result_frame(counts: list[int]) -> bytes:
    header = link_pb2.StepResult(step_id=1, counts=counts)
    return link_pb2.Envelope(
        scheduler_boot_id=BOOT_ID, worker_boot_id=5, step_result=header
    ).SerializeToString()


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
    scheduler = Scheduler(Limits(64, 8), setup.geometry())
    scheduler.submit(NewRequest("a", list(range(9)), 4))
    plan = scheduler.plan()
    assert plan is not None
    link.send(link_pb2.Envelope(worker_boot_id=5), plan)
    envelope, [buffer] = dealer.hear("step_plan")
    header = envelope.step_plan
    got = decode_plan(header.step_id, header.awaits_mask, header.counts, buffer)
    assert got.token_ids.tolist() == list(range(9))
    assert got.blocks.tolist() == plan.blocks.tolist()
    assert got.u.tolist() == plan.u.tolist()

    result = StepResult(0, 12, 3, np.array([41], np.int32), np.ones(1, np.int32))
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
    new.say(ready=link_pb2.Ready())  # before its Hello
    new.hello()
    assert next_kind(heard) == "hello"
    old.hear("heartbeat")
    new.hear("heartbeat")  # of both sessions, which of them serves is not the link's to say
    link.drop(old.boot_id, "another worker took over")
    farewell, _ = old.hear("bye")
    assert "took over" in farewell.bye.reason
    old.say(ready=link_pb2.Ready())  # its session has ended
    old.socket.send_multipart([b"\xff\xff\xff"])
    new.say(to=BOOT_ID - 1, ready=link_pb2.Ready())  # meant for a former scheduler
    stranger = Dealer(link.address, 6).connect()  # another connection, the same name
    stranger.say(ready=link_pb2.Ready())
    stranger.hello()
    stranger.say(to=0, heartbeat=link_pb2.Heartbeat())
    new.hello()  # said again while the answer was on its way
    new.say(heartbeat=link_pb2.Heartbeat(busy="idle"))
    assert next_kind(heard) == "heartbeat"
    time.sleep(0.1)
    assert heard.empty()
    for dealer in (old, new, stranger):
        dealer.close()


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xff\xff\xff"],
        [b"\x1a\xff"],
        [result_frame(counts=[1]), b""],
        [result_frame(counts=[0, *NOTHING])],
        [result_frame(counts=[1, *NOTHING[1:]]), b"\0" * 3],
        [result_frame(counts=[2**31 - 1] * len(NOTHING)), b"\0" * 16],
        [result_frame(counts=[-1, *NOTHING[1:]]), b"\0" * 4],
    ],
)
def test_what_cannot_be_read_is_an_error_of_that_session(
    link: WorkerLink, heard: queue.SimpleQueue[WorkerMessage], frames: list[bytes]
) -> None:
    """Dropped in silence, a result is waited for until the end of days; raised, it ends the thread
    that hears all workers."""
    bad, good = Dealer(link.address, 5).connect(), Dealer(link.address, 6).connect()
    bad.hello()
    assert next_kind(heard) == "hello"
    bad.socket.send_multipart(frames)
    message = heard.get(timeout=10)
    assert message.envelope.worker_boot_id == 5
    assert message.error is not None
    assert message.result is None
    assert "cannot be read" in message.error
    good.hello()
    assert next_kind(heard) == "hello"
    for dealer in (bad, good):
        dealer.close()


def test_a_closed_connection_is_an_error_of_the_session(
    link: WorkerLink, heard: queue.SimpleQueue[WorkerMessage]
) -> None:
    """A worker that was killed is noticed only when its heartbeats have failed for long."""
    dealer = Dealer(link.address, 5).connect()
    dealer.hello()
    assert next_kind(heard) == "hello"
    dealer.close()
    message = heard.get(timeout=10)
    assert (message.envelope.worker_boot_id, message.error) == (5, "its connection is closed")


def test_another_session_on_the_same_connection_ends_the_one_before(
    link: WorkerLink, heard: queue.SimpleQueue[WorkerMessage]
) -> None:
    """A worker that says Hello under ever new names would have a session for each of them."""
    dealer = Dealer(link.address, 5).connect()
    dealer.hello()
    assert next_kind(heard) == "hello"
    dealer.boot_id = 6
    dealer.hello()
    message = heard.get(timeout=10)
    assert (message.envelope.worker_boot_id, message.error) == (5, "it began another session")
    assert next_kind(heard) == "hello"
    dealer.close()


def test_a_thread_that_dies_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The service would go on without ever hearing a worker again."""
    deaths: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def fail(*_: object) -> bool:
        raise zmq.ZMQError(zmq.ETERM)

    monkeypatch.setattr(WorkerLink, "_process_outbox", fail)
    link = WorkerLink(f"ipc://{tmp_path}/link", BOOT_ID)
    link.start(lambda message: None, deaths.put)
    link.drop(1)
    assert isinstance(deaths.get(timeout=10), zmq.ZMQError)
    link.stop()
    assert "worker link crashed" in caplog.text


def test_nobodys_address_is_taken(tmp_path: Path) -> None:
    """A second scheduler of the same user gets the workers of the first one."""
    first, second = (WorkerLink(f"ipc://{tmp_path}/link", boot_id) for boot_id in (1, 2))
    heard: queue.SimpleQueue[WorkerMessage] = queue.SimpleQueue()
    first.start(heard.put)
    with pytest.raises(OSError, match=rf"link cannot be bound: .*pid {os.getpid()}.*--worker-addr"):
        second.start(lambda message: None)
    dealer = Dealer(first.address, 5).connect()
    dealer.hello()
    assert next_kind(heard) == "hello"
    dealer.close()
    first.stop()
    second.start(heard.put)  # the file is still there, and in nobody's way
    second.stop()


@pytest.mark.parametrize("is_live", [True, False])
def test_a_socket_of_another_program_is_kept_and_one_left_behind_is_not(
    tmp_path: Path, is_live: bool
) -> None:
    """libzmq removes whatever is at the path; a lock alone protects only from one's own kind."""
    path = tmp_path / "link"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    if not is_live:
        listener.close()
    link = WorkerLink(f"ipc://{path}", BOOT_ID)
    if is_live:
        with pytest.raises(OSError, match="another program listens there"):
            link.start(lambda message: None)
        listener.close()
        path.unlink()
        path.write_text("a letter")
        with pytest.raises(OSError, match="the path exists and is not a socket"):
            link.start(lambda message: None)
        assert path.read_text() == "a letter"
        path.unlink()
    link.start(lambda message: None)
    link.stop()


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
    link.send(link_pb2.Envelope(worker_boot_id=5, configure=link_pb2.Configure()))
    dealer.hello()
    assert next_kind(heard) == "hello"
    configure = link_pb2.Configure(model="second")
    link.send(link_pb2.Envelope(worker_boot_id=5, configure=configure))
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
