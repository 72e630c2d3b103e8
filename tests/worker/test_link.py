"""The worker's end of the link against a real socket at the other end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from zmq.auth import create_certificates, load_certificate

from protos import link_pb2
from protos.plan import PLAN_DIMENSIONS, StepResult
from protos.session import PROTOCOL
from tests.support.fake_scheduler import FakeScheduler, make_plan
from worker.process.curve import CurveKeys
from worker.process.link import Link, LinkClosed, PlanRefused, SessionEnded

MakeLink = Callable[..., Link]
MakeScheduler = Callable[..., FakeScheduler]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/link"


@pytest.fixture
def make_scheduler(address: str) -> Iterator[MakeScheduler]:
    made: list[FakeScheduler] = []

    def make(boot_id: int = 7) -> FakeScheduler:
        made.append(FakeScheduler(address, boot_id))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close()


@pytest.fixture
def make_link(address: str) -> Iterator[MakeLink]:
    made: list[Link] = []

    def make(heartbeat_seconds: float = 0.02, peer_timeout: float = 60.0) -> Link:
        hello = link_pb2.Hello(protocol=PROTOCOL, host="here", pid=42)
        link = Link(address, hello, heartbeat_seconds=heartbeat_seconds, peer_timeout=peer_timeout)
        made.append(link)
        return link

    yield make
    for link in made:
        link.close("the test is over")


def make_result(step_id: int, *token_ids: int) -> StepResult:
    count = len(token_ids)
    return StepResult(
        step_id=step_id,
        device_microseconds=5,
        queue_microseconds=6,
        token_ids=np.array(token_ids, np.int32),
        is_finite=np.ones(count, np.int32),
    )


def test_hello_is_answered_by_a_session(make_link: MakeLink, make_scheduler: MakeScheduler) -> None:
    """The worker may be there first: it must be heard once the scheduler binds."""
    link = make_link()
    scheduler = make_scheduler()
    hello = scheduler.configure(model="tiny", page_size=16)
    assert (hello.scheduler_boot_id, hello.hello.pid) == (0, 42)
    assert hello.worker_boot_id != 0
    session = link.accept()
    assert session.configure == link_pb2.Configure(model="tiny", page_size=16)
    session.send_ready(link_pb2.Ready(num_chunks=9))
    ready = scheduler.receive("ready")
    assert ready.ready.num_chunks == 9
    assert (ready.scheduler_boot_id, ready.worker_boot_id) == (7, hello.worker_boot_id)


def test_plan_and_result_cross_whole(make_link: MakeLink, make_scheduler: MakeScheduler) -> None:
    """Arrays must arrive as they were sent, in both directions."""
    link, scheduler = make_link(), make_scheduler()
    scheduler.configure()
    session = link.accept()
    scheduler.send_plan(make_plan(3, token_ids=[5, -1, 9], rows=[], blocks=[7, 8]))
    received = session.receive()
    assert received.plan.step_id == 3
    assert received.plan.token_ids.tolist() == [5, -1, 9]
    assert received.plan.blocks.tolist() == [7, 8]
    assert received.at <= time.monotonic()
    session.send_result(make_result(3, 11, 12))
    result = scheduler.receive_result()
    assert (result.step_id, result.token_ids.tolist()) == (3, [11, 12])
    assert (result.device_microseconds, result.queue_microseconds) == (5, 6)


def test_heart_beats_while_the_main_thread_computes(
    make_link: MakeLink, make_scheduler: MakeScheduler
) -> None:
    """Without this a long load or step looks like a dead worker, and everything is recomputed."""
    link, scheduler = make_link(heartbeat_seconds=0.01), make_scheduler()
    scheduler.configure()
    session = link.accept()
    link.set_busy("loading", progress=0.5)
    ends_at = time.monotonic() + 0.5
    while time.monotonic() < ends_at:
        sum(range(10_000))  # holds the interpreter's lock, as converting a model does
    link.set_busy("step", step_id=4)
    beats = [scheduler.receive("heartbeat").heartbeat for _ in range(5)]
    assert ("loading", 0.5, -1) in {(b.busy, b.progress, b.last_finished_step) for b in beats}

    session.send_result(make_result(3))
    scheduler.receive("step_result")
    beat = scheduler.receive("heartbeat").heartbeat
    assert (beat.busy, beat.busy_step, beat.last_finished_step) == ("step", 4, 3)


def test_messages_of_another_session_are_dropped(
    make_link: MakeLink, make_scheduler: MakeScheduler
) -> None:
    """A plan meant for a former worker names blocks that hold something else here."""
    link, scheduler = make_link(), make_scheduler()
    hello = scheduler.configure()
    session = link.accept()
    scheduler.send_plan(make_plan(1), worker_boot_id=hello.worker_boot_id ^ 1)
    scheduler.send(b"no envelope", bye=link_pb2.Bye(), worker_boot_id=3)
    scheduler.send_plan(make_plan(2))
    assert session.receive().plan.step_id == 2


def test_step_out_of_order_is_refused_until_resume(
    make_link: MakeLink, make_scheduler: MakeScheduler
) -> None:
    """A lost plan leaves KV unwritten: going on would give wrong tokens silently."""
    link, scheduler = make_link(), make_scheduler()
    scheduler.configure()
    session = link.accept()
    for step_id in (5, 6, 8, 9):
        scheduler.send_plan(make_plan(step_id))
    scheduler.send(resume=link_pb2.Resume(next_step_id=20))
    scheduler.send_plan(make_plan(20))
    assert [session.receive().plan.step_id for _ in range(2)] == [5, 6]
    with pytest.raises(PlanRefused, match="step 8 came where 7 was expected") as refused:
        session.receive()
    assert refused.value.step_id == 8
    assert session.wait_for_resume() == 1
    assert session.receive().plan.step_id == 20


def test_plan_that_does_not_fit_the_layout_is_refused(
    make_link: MakeLink, make_scheduler: MakeScheduler
) -> None:
    """A scheduler of another version must be told, not crash the worker."""
    link, scheduler = make_link(), make_scheduler()
    scheduler.configure()
    session = link.accept()
    scheduler.send(
        b"12345678", step_plan=link_pb2.StepPlan(step_id=1, counts=[0] * len(PLAN_DIMENSIONS))
    )
    with pytest.raises(PlanRefused, match="step 1: the buffer"):
        session.receive()


def test_restarted_scheduler_gets_a_new_session(
    make_link: MakeLink, make_scheduler: MakeScheduler
) -> None:
    """A scheduler that comes back must find the worker at once, and nothing of the old session."""
    link, old = make_link(heartbeat_seconds=0.5), make_scheduler()
    first = old.configure().worker_boot_id
    session = link.accept()
    old.close()
    with pytest.raises(SessionEnded):
        session.receive()
    session.send_result(make_result(1, 99))  # of the old session: must not reach the new one

    new = make_scheduler(boot_id=8)
    second = new.configure().worker_boot_id
    assert second not in (0, first)
    session = link.accept()
    session.send_ready(link_pb2.Ready())
    assert new.receive("ready").scheduler_boot_id == 8


def test_another_boot_id_on_the_same_socket_is_a_restart(
    make_link: MakeLink, make_scheduler: MakeScheduler
) -> None:
    """A proxy may hide the new connection; the boot_id does not."""
    link, scheduler = make_link(), make_scheduler()
    scheduler.configure()
    session = link.accept()
    scheduler.send(heartbeat=link_pb2.Heartbeat(), scheduler_boot_id=1234)
    with pytest.raises(SessionEnded):
        session.receive()
    scheduler.receive("hello")


def test_silent_scheduler_is_given_up(make_link: MakeLink, make_scheduler: MakeScheduler) -> None:
    """A host that vanished closes no connection: only silence tells."""
    link, scheduler = make_link(peer_timeout=0.2), make_scheduler()
    first = scheduler.configure().worker_boot_id
    session = link.accept()
    with pytest.raises(SessionEnded):
        session.receive()
    assert scheduler.receive("hello").worker_boot_id != first


def test_heartbeats_keep_a_session_alive(
    make_link: MakeLink, make_scheduler: MakeScheduler
) -> None:
    """An idle scheduler sends nothing else, and must not lose its worker for that."""
    link, scheduler = make_link(peer_timeout=1.0), make_scheduler()
    scheduler.configure()
    session = link.accept()
    ends_at = time.monotonic() + 2.0
    while time.monotonic() < ends_at:
        scheduler.send(heartbeat=link_pb2.Heartbeat())
        scheduler.receive("heartbeat")  # one of the worker's, every 0.02 s: the pace of this loop
    assert not session.has_ended


def test_unanswered_hello_is_said_again(make_link: MakeLink, make_scheduler: MakeScheduler) -> None:
    """A scheduler may die between Hello and Configure."""
    make_link(peer_timeout=0.2)
    scheduler = make_scheduler()
    scheduler.receive("hello")
    scheduler.receive("hello")


def test_dismissed_worker_waits_for_the_next_scheduler(
    make_link: MakeLink, make_scheduler: MakeScheduler
) -> None:
    """Two workers that each say Hello after every Bye would take turns for ever."""
    link, scheduler = make_link(peer_timeout=0.1), make_scheduler()
    scheduler.configure()
    session = link.accept()
    scheduler.send(bye=link_pb2.Bye(reason="another worker took over"))
    with pytest.raises(SessionEnded):
        session.receive()
    while (envelope := scheduler.receive_any(0.4)) is not None:
        assert envelope.WhichOneof("message") == "heartbeat"  # those sent before the Bye came
    scheduler.close()
    make_scheduler(boot_id=8).receive("hello")


def test_a_dismissed_worker_offers_itself_without_insisting(
    make_link: MakeLink, make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor may go away, and nobody else would ever call it back; a Hello like any other
    would take the requests from a successor that is well."""
    monkeypatch.setattr("worker.process.link.STANDBY_SECONDS", 0.1)
    link, scheduler = make_link(), make_scheduler()
    assert not scheduler.configure().hello.is_standby
    link.accept()
    scheduler.send(bye=link_pb2.Bye(reason="another worker took over"))
    offers = [scheduler.receive("hello") for _ in range(3)]
    assert all(offer.hello.is_standby for offer in offers)
    assert len({offer.worker_boot_id for offer in offers}) == 3
    scheduler.configure(model="again")
    session = link.accept()
    assert session.configure.model == "again"
    session.send_ready(link_pb2.Ready())
    scheduler.receive("ready")
    scheduler.send(heartbeat=link_pb2.Heartbeat(), scheduler_boot_id=1234)
    assert not scheduler.receive("hello").hello.is_standby


def test_no_heartbeat_calls_a_step_finished_before_its_result_is_sent(
    make_link: MakeLink, make_scheduler: MakeScheduler
) -> None:
    """The scheduler takes a result that comes later for lost, and the worker with it."""
    link, scheduler = make_link(heartbeat_seconds=0.0005), make_scheduler()
    scheduler.configure()
    session = link.accept()
    for step_id in range(200):
        session.send_result(make_result(step_id, 1))
    seen = -1
    while seen < 199:
        envelope = scheduler.receive_any(10)
        assert envelope is not None
        if envelope.WhichOneof("message") == "step_result":
            seen = envelope.step_result.step_id
        else:
            assert envelope.heartbeat.last_finished_step <= seen


def test_close_says_bye_after_what_was_sent(
    make_link: MakeLink, make_scheduler: MakeScheduler
) -> None:
    """The scheduler must hear why at once, not after a timeout; and a last Fault must arrive."""
    link, scheduler = make_link(), make_scheduler()
    scheduler.configure()
    session = link.accept()
    session.send_fault(-1, "no such model", is_fatal=True)
    link.close("told to stop")
    fault = scheduler.receive("fault").fault
    assert (fault.step_id, fault.error, fault.is_fatal) == (-1, "no such model", True)
    assert scheduler.receive("bye").bye.reason == "told to stop"
    with pytest.raises(SessionEnded):
        session.receive()
    with pytest.raises(LinkClosed):
        link.accept()
    link.close("again")  # does nothing


@pytest.mark.parametrize("bad", ["nonsense", "http://x", "tcp://nowhere"])
def test_bad_address_is_named(bad: str) -> None:
    """A typing error must not wait for a scheduler for ever."""
    with pytest.raises(ValueError, match="allowed: ipc://PATH or tcp://HOST:PORT"):
        Link(bad, link_pb2.Hello())


def test_curve_encrypts_and_keeps_others_out(tmp_path: Path) -> None:
    """Over tcp prompts pass through a network; and who cannot encrypt must not be heard."""
    create_certificates(tmp_path, "server")
    create_certificates(tmp_path, "worker")
    server, server_secret = load_certificate(tmp_path / "server.key_secret")
    assert server_secret is not None
    keys = CurveKeys.from_environment(
        {
            "CHAIRLIFT_CURVE_KEY_FILE": str(tmp_path / "worker.key_secret"),
            "CHAIRLIFT_CURVE_SERVER_KEY_FILE": str(tmp_path / "server.key"),
        }
    )
    address = f"ipc://{tmp_path}/curve"
    scheduler = FakeScheduler(address, curve=(server, server_secret))
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(address)
        stranger.send(link_pb2.Envelope(hello=link_pb2.Hello(pid=1)).SerializeToString())
        link = Link(address, link_pb2.Hello(pid=2), keys)
        try:
            assert scheduler.configure().hello.pid == 2
            assert link.accept().scheduler_boot_id == 7
        finally:
            link.close("the test is over")
            scheduler.close()


def test_curve_needs_both_keys(tmp_path: Path) -> None:
    """Half a setting must not mean an unencrypted link."""
    assert CurveKeys.from_environment({}) is None
    create_certificates(tmp_path, "worker")
    own = {"CHAIRLIFT_CURVE_KEY_FILE": str(tmp_path / "worker.key_secret")}
    server = {"CHAIRLIFT_CURVE_SERVER_KEY_FILE": str(tmp_path / "worker.key")}
    with pytest.raises(ValueError, match="CHAIRLIFT_CURVE_SERVER_KEY_FILE is not set"):
        CurveKeys.from_environment(own)
    with pytest.raises(ValueError, match="CHAIRLIFT_CURVE_KEY_FILE is not set"):
        CurveKeys.from_environment(server)
    public_only = {"CHAIRLIFT_CURVE_KEY_FILE": str(tmp_path / "worker.key")}
    with pytest.raises(ValueError, match="holds no secret key"):
        CurveKeys.from_environment(public_only | server)
