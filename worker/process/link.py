"""The worker's end of the link: a DEALER socket, owned by one I/O thread.

The thread says Hello, takes the Configure that answers it, beats the heart while the main thread
loads or computes, and hands plans over. What belongs to one Hello/Configure pair is a `Session`.
A session is over when the scheduler says Bye, closes its socket, turns up with another boot_id,
or is silent for `peer_timeout`; the thread then says Hello anew on a new socket, under a new
worker_boot_id, so that nothing of the old session can reach the new one. After a Bye, which often
means that another worker took over, it stands by: every STANDBY_SECONDS it offers itself by a Hello
that counts only while the scheduler has nobody, until a Configure comes.

Owns: the socket, the sessions, the order of steps. Does not own: what a plan means, and what the
main thread does with it (worker/process/loop.py).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
import time
from typing import Final, NamedTuple

import zmq
from google.protobuf.message import DecodeError
from zmq.utils.monitor import recv_monitor_message

from protos import link_pb2
from protos.plan import LayoutError, StepPlan, StepResult, decode_plan, encode_result
from protos.session import HEARTBEAT_SECONDS
from worker.process.curve import CurveKeys

logger = logging.getLogger(__name__)

STANDBY_SECONDS: Final = 2.0  # between two offers of a worker that was dismissed
_WAKE: Final = "inproc://wake"


class SessionEnded(Exception):
    """The scheduler of this session is gone; `Link.accept` gives the next one."""


class LinkClosed(Exception):
    """The link is closed, or its I/O thread died (the log says why)."""


class PlanRefused(Exception):
    """A plan that cannot be run as it came: out of order, or not as protos/plan.py lays it out."""

    def __init__(self, step_id: int, reason: str) -> None:
        super().__init__(reason)
        self.step_id = step_id


class Received(NamedTuple):
    """A plan, and when its message was taken from the socket (time.monotonic seconds)."""

    plan: StepPlan
    at: float


class _Incoming(NamedTuple):
    envelope: link_pb2.Envelope
    buffer: bytes
    at: float


class _Outgoing(NamedTuple):
    session: Session
    frames: list[bytes]
    finished_step: int | None = None  # whose result it is


class Session:
    """What the main thread sees of one scheduler. Its methods may be called after its end: what
    is sent is dropped then, and `receive` raises SessionEnded."""

    def __init__(
        self, link: Link, scheduler_boot_id: int, worker_boot_id: int, configure: link_pb2.Configure
    ) -> None:
        self.configure = configure
        self.scheduler_boot_id = scheduler_boot_id
        self.worker_boot_id = worker_boot_id
        self.last_finished_step = -1  # none yet
        self.has_ended = False
        self._link = link
        self._inbox: queue.SimpleQueue[_Incoming | None] = queue.SimpleQueue()
        self._next_step_id: int | None = None  # the scheduler chooses the first one

    def receive(self) -> Received:
        """Waits for the next plan. Raises SessionEnded, or PlanRefused for a plan that does not
        follow the one before or does not fit the layout."""
        while True:
            message = self._next()
            if message.envelope.WhichOneof("message") != "step_plan":
                logger.warning("dropped a Resume: no step is faulty")
                continue
            header = message.envelope.step_plan
            expected = self._next_step_id
            if expected is not None and header.step_id != expected:
                raise PlanRefused(
                    header.step_id, f"step {header.step_id} came where {expected} was expected"
                )
            try:
                plan = decode_plan(
                    header.step_id, header.awaits_mask, header.counts, message.buffer
                )
            except LayoutError as error:
                raise PlanRefused(header.step_id, f"step {header.step_id}: {error}") from error
            self._next_step_id = header.step_id + 1
            return Received(plan, message.at)

    def wait_for_resume(self) -> int:
        """Discards plans until a Resume; the number of plans discarded. Raises SessionEnded."""
        num_discarded = 0
        while True:
            envelope = self._next().envelope
            if envelope.WhichOneof("message") == "resume":
                self._next_step_id = envelope.resume.next_step_id
                return num_discarded
            num_discarded += 1

    def send_ready(self, ready: link_pb2.Ready) -> None:
        self._send(link_pb2.Envelope(ready=ready))

    def send_result(self, result: StepResult) -> None:
        counts, buffer = encode_result(result)
        header = link_pb2.StepResult(
            step_id=result.step_id,
            counts=counts,
            device_microseconds=result.device_microseconds,
            queue_microseconds=result.queue_microseconds,
        )
        frames = [self._seal(link_pb2.Envelope(step_result=header)), buffer]
        self._link._hand_over(_Outgoing(self, frames, result.step_id))

    def send_fault(self, step_id: int, error: str, is_fatal: bool = False) -> None:
        """`step_id` -1: not in a step. `is_fatal`: this process exits and a new one would too."""
        fault = link_pb2.Fault(step_id=step_id, error=error, is_fatal=is_fatal)
        self._send(link_pb2.Envelope(fault=fault))

    def _send(self, envelope: link_pb2.Envelope) -> None:
        self._link._hand_over(_Outgoing(self, [self._seal(envelope)]))

    def _seal(self, envelope: link_pb2.Envelope) -> bytes:
        envelope.scheduler_boot_id = self.scheduler_boot_id
        envelope.worker_boot_id = self.worker_boot_id
        return envelope.SerializeToString()

    def _next(self) -> _Incoming:
        message = None if self.has_ended else self._inbox.get()
        if message is None:
            raise SessionEnded
        return message

    def _end(self) -> None:
        self.has_ended = True
        self._inbox.put(None)


class Link:
    """Connects to `address` (ipc:// or tcp://) and keeps a session going until `close`.

    `heartbeat_seconds` is the time between heartbeats, `peer_timeout` the seconds of silence after
    which the scheduler counts as gone.
    """

    def __init__(
        self,
        address: str,
        hello: link_pb2.Hello,
        keys: CurveKeys | None = None,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        peer_timeout: float = 10.0,
    ) -> None:
        self.address = address
        self._hello = hello
        self._keys = keys
        self._heartbeat_seconds = heartbeat_seconds
        self._peer_timeout = peer_timeout
        self._busy = ("idle", 0, 0.0)  # replaced whole, so it needs no lock
        self._is_dismissed = False  # since the last Configure
        self._sessions: queue.SimpleQueue[Session | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()  # None: close
        self._context = zmq.Context()
        self._wake = self._context.socket(zmq.PUSH)
        self._wake.bind(_WAKE)
        self._wake_lock = threading.Lock()  # a zmq socket takes one thread at a time
        try:
            self._connect()  # here, so that a bad address is the caller's error
        except ValueError:
            self._context.destroy()
            raise
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def accept(self) -> Session:
        """Waits for a scheduler's Configure and gives the session that it opens."""
        while True:
            session = self._sessions.get()
            if session is None:
                raise LinkClosed(f"the link to {self.address} is closed")
            if not session.has_ended:
                return session

    @property
    def busy(self) -> tuple[str, int, float]:
        """What `set_busy` was told last."""
        return self._busy

    def set_busy(self, busy: str, step_id: int = 0, progress: float = 0.0) -> None:
        """What the heartbeats say: idle, loading, capturing, compiling or step; from any thread."""
        self._busy = (busy, step_id, progress)

    def close(self, reason: str, is_failure: bool = False) -> None:
        """Says Bye and stops the I/O thread; what was sent before still goes out.

        `is_failure`: a step may be the cause.
        """
        if self._context.closed:
            return
        self._goodbye = link_pb2.Bye(reason=reason, is_failure=is_failure)
        self._hand_over(None)
        self._thread.join()
        self._wake.close()
        self._context.term()

    def _hand_over(self, message: _Outgoing | None) -> None:
        # A signal may raise anywhere here: the queue then still holds a message or none, and the
        # I/O thread looks at it with the next heartbeat at the latest.
        self._outbox.put(message)
        # Never waits: where the wake-up cannot be left, the I/O thread has others to read first,
        # has not started to look yet, or has ended (which `accept` and `receive` tell).
        with self._wake_lock, contextlib.suppress(zmq.Again):
            self._wake.send(b"", zmq.NOBLOCK)

    # Everything below runs in the I/O thread.

    def _run(self) -> None:
        wake = self._context.socket(zmq.PULL)
        wake.connect(_WAKE)
        logger.info("waiting for the scheduler at %s", self.address)
        try:
            while self._converse(wake):
                self._disconnect()
                self._connect()
        finally:
            self._end_session()
            self._sessions.put(None)
            self._disconnect()
            wake.close()

    def _connect(self) -> None:
        """A fresh socket: what the old one still had to send or deliver is of a former session."""
        self._session: Session | None = None
        self._worker_boot_id = 1 + secrets.randbelow(2**64 - 1)
        dealer = self._dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.sndhwm = dealer.rcvhwm = 0  # no limit: a session that stalls is ended, not throttled
        # the same identity after a reconnection within the session; it must not start with a 0
        dealer.identity = f"w{self._worker_boot_id:x}".encode()
        if self._keys is not None:
            dealer.curve_publickey = self._keys.public
            dealer.curve_secretkey = self._keys.secret
            dealer.curve_serverkey = self._keys.server
        self._monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            dealer.connect(self.address)
        except zmq.ZMQError as error:
            self._disconnect()
            raise ValueError(
                f"--connect is {self.address!r} ({error}); allowed: ipc://PATH or tcp://HOST:PORT"
            ) from error

    def _disconnect(self) -> None:
        if not self._dealer.closed:
            self._dealer.disable_monitor()
            self._monitor.close()
            self._dealer.close()

    def _converse(self, wake: zmq.Socket[bytes]) -> bool:
        """From Hello to the end of the session. False when the link is to be closed."""
        hello = link_pb2.Envelope(worker_boot_id=self._worker_boot_id, hello=self._hello)
        hello.hello.is_standby = self._is_dismissed
        self._dealer.send(hello.SerializeToString())
        poller = zmq.Poller()
        for socket in (self._dealer, self._monitor, wake):
            poller.register(socket, zmq.POLLIN)
        self._heard_at = time.monotonic()  # from the scheduler
        beat_at = 0.0
        while True:
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + self._heartbeat_seconds
                self._beat()
            ready = dict(poller.poll(1 + int(1000 * (beat_at - now))))
            if wake in ready:
                wake.recv()
            if not self._send_outbox():
                return False
            if self._dealer in ready:
                if not self._take(self._dealer.recv_multipart()):
                    return self._over("the scheduler started anew")
            elif self._is_silent():  # nothing waits to be read: this thread was not just held up
                return self._over(f"the scheduler was silent for {self._patience:g} s")
            if self._monitor in ready:
                recv_monitor_message(self._monitor)
                # without a session zmq's own retries do; a new socket each time would be a race
                if self._session is not None or self._is_dismissed != hello.hello.is_standby:
                    return self._over("the scheduler closed the connection")

    def _take(self, frames: list[bytes]) -> bool:
        """One message of the scheduler; False when it ends the session."""
        try:
            envelope = link_pb2.Envelope.FromString(frames[0])
        except DecodeError:
            logger.warning("dropped a message of %d bytes: no envelope", len(frames[0]))
            return True
        kind = envelope.WhichOneof("message")
        session = self._session
        if envelope.worker_boot_id != self._worker_boot_id:
            logger.debug("dropped %s: meant for worker %x", kind, envelope.worker_boot_id)
        elif kind == "bye":
            logger.warning("the scheduler said goodbye: %s", envelope.bye.reason)
            self._end_session()
            self._is_dismissed = True
            self._heard_at = time.monotonic()
        elif session is None:
            if kind != "configure":
                logger.warning("dropped %s: there is no session yet", kind)
                return True
            self._is_dismissed = False
            self._heard_at = time.monotonic()
            self._session = Session(
                self, envelope.scheduler_boot_id, self._worker_boot_id, envelope.configure
            )
            self._sessions.put(self._session)
        elif envelope.scheduler_boot_id != session.scheduler_boot_id:
            return False
        else:
            self._heard_at = time.monotonic()
            if kind in ("step_plan", "resume"):
                buffer = frames[1] if len(frames) > 1 else b""
                session._inbox.put(_Incoming(envelope, buffer, self._heard_at))
            elif kind != "heartbeat":
                logger.warning("dropped %s: not expected within a session", kind)
        return True

    def _send_outbox(self) -> bool:
        """What other threads handed over; False when that is the wish to close."""
        while not self._outbox.empty():
            message = self._outbox.get()
            if message is None:
                if self._session is not None:
                    self._dealer.linger = 1000  # milliseconds for what is still to be sent
                    bye = link_pb2.Envelope(bye=self._goodbye)
                    self._dealer.send(self._session._seal(bye), zmq.NOBLOCK)
                return False
            if message.session is self._session:
                self._dealer.send_multipart(message.frames, zmq.NOBLOCK)
                if message.finished_step is not None:  # no heartbeat says so before the result
                    message.session.last_finished_step = message.finished_step
        return True

    def _beat(self) -> None:
        session = self._session
        if session is not None:
            busy, step_id, progress = self._busy
            beat = link_pb2.Heartbeat(
                last_finished_step=session.last_finished_step,
                busy=busy,
                busy_step=step_id,
                progress=progress,
            )
            self._dealer.send(session._seal(link_pb2.Envelope(heartbeat=beat)), zmq.NOBLOCK)

    @property
    def _patience(self) -> float:
        """Seconds of silence after which a new socket and a new Hello are due."""
        return STANDBY_SECONDS if self._is_dismissed else self._peer_timeout

    def _is_silent(self) -> bool:
        return time.monotonic() - self._heard_at > self._patience

    def _over(self, reason: str) -> bool:
        if self._session is not None:
            logger.warning("session over: %s; saying Hello again", reason)
        self._end_session()
        return True

    def _end_session(self) -> None:
        if self._session is not None:
            self._session._end()
            self._session = None
