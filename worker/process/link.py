"""The worker's end of the link to the scheduler: a DEALER socket, owned by one I/O thread.

The thread sends Hello, receives the Configure that answers it, sends heartbeats while the main
thread loads or computes, and passes messages to the session that a Hello and its Configure opened.
A session ends when the scheduler sends Bye, closes its socket, reappears with another boot_id, or
is silent for `peer_timeout`; the thread then sends a new Hello on a new socket, under a new
worker_boot_id, so that nothing from the old session can reach the new one. After a Bye, which
usually means that another worker took over, the worker stands by: every STANDBY_SECONDS it sends a
Hello that counts only while the scheduler has no worker, until a Configure comes.

Owns: the socket, when sessions begin and end. Does not own: what is received and sent in a session
(session.py).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
import time
from typing import Final

import zmq
from google.protobuf.message import DecodeError
from zmq.utils.monitor import recv_monitor_message

from protos import link_pb2
from protos.link import HEARTBEAT_SECONDS
from worker.process.curve import CurveKeys
from worker.process.session import Outgoing, Session

logger = logging.getLogger(__name__)

STANDBY_SECONDS: Final = 2.0  # between two Hellos of a worker that was dismissed
_WAKE: Final = "inproc://wake"


class LinkClosed(Exception):
    """The link is closed, or its I/O thread died (the log says why)."""


class SchedulerLink:
    """Connects to `address` (ipc:// or tcp://) and opens session after session until `close`.

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
        self._busy = ("idle", 0, 0.0)  # replaced as a whole, so it needs no lock
        self._is_dismissed = False  # since the last Configure
        self._sessions: queue.SimpleQueue[Session | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()  # None: close
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
        """Waits for a scheduler's Configure; returns the session that it opens. Raises
        LinkClosed."""
        while True:
            session = self._sessions.get()
            if session is None:
                raise LinkClosed(f"the link to {self.address} is closed")
            if not session.has_ended:
                return session

    @property
    def busy(self) -> tuple[str, int, float]:
        """What heartbeats report: (busy, step_id, progress) of the last `set_busy`."""
        return self._busy

    def set_busy(self, busy: str, step_id: int = 0, progress: float = 0.0) -> None:
        """Sets what heartbeats report: idle, loading, capturing, compiling, step or mask. From
        any thread."""
        self._busy = (busy, step_id, progress)

    def close(self, reason: str, is_failure: bool = False) -> None:
        """Sends Bye and stops the I/O thread, after everything sent before.

        `is_failure`: a step may be the cause.
        """
        if self._context.closed:
            return
        self._goodbye = link_pb2.Bye(reason=reason, is_failure=is_failure)
        self._hand_over(None)
        self._thread.join()
        self._wake.close()
        self._context.term()

    def _hand_over(self, message: Outgoing | None) -> None:
        # A signal may raise anywhere here: the queue then holds the message or not, and the I/O
        # thread reads it with the next heartbeat at the latest.
        self._outbox.put(message)
        # Never waits: if no wake-up can be sent, the I/O thread has others to read first, has not
        # started to poll, or has ended (then `accept` and `receive` raise).
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
        """A new socket: whatever the old one still held belongs to a former session."""
        self._session: Session | None = None
        self._worker_boot_id = 1 + secrets.randbelow(2**64 - 1)
        dealer = self._dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.sndhwm = dealer.rcvhwm = 0  # no limit: a stalled session is ended, not throttled
        # the same identity after reconnecting within the session; it must not start with a 0
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
        """From Hello to the end of the session. False if the link is to be closed."""
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
                if not self._route(self._dealer.recv_multipart()):
                    return self._over("the scheduler was restarted")
            elif self._is_silent():  # nothing is left to read, so this thread was not just delayed
                return self._over(f"no message from the scheduler for {self._patience:g} s")
            if self._monitor in ready:
                recv_monitor_message(self._monitor)
                # without a session zmq retries by itself; a new socket each time would be a race
                if self._session is not None or self._is_dismissed != hello.hello.is_standby:
                    return self._over("the scheduler closed the connection")

    def _route(self, frames: list[bytes]) -> bool:
        """Routes a message of the scheduler by its kind; False if it ends the session."""
        try:
            envelope = link_pb2.Envelope.FromString(frames[0])
        except DecodeError:
            logger.warning("dropped a message of %d bytes: not an Envelope", len(frames[0]))
            return True
        kind = envelope.WhichOneof("message")
        session = self._session
        if envelope.worker_boot_id != self._worker_boot_id:
            logger.debug("dropped %s: addressed to worker %x", kind, envelope.worker_boot_id)
        elif kind == "bye":
            logger.warning("the scheduler sent Bye: %s", envelope.bye.reason)
            self._end_session()
            self._is_dismissed = True
            self._heard_at = time.monotonic()
        elif session is None:
            if kind != "configure":
                logger.warning("dropped %s: no session is open", kind)
                return True
            self._is_dismissed = False
            self._heard_at = time.monotonic()
            self._session = Session(
                self._hand_over,
                envelope.scheduler_boot_id,
                self._worker_boot_id,
                envelope.configure,
            )
            self._sessions.put(self._session)
        elif envelope.scheduler_boot_id != session.scheduler_boot_id:
            return False
        else:
            self._heard_at = time.monotonic()
            buffer = frames[1] if len(frames) > 1 else b""
            if not session.deliver(envelope, buffer, self._heard_at):
                logger.warning("dropped %s: not expected within a session", kind)
        return True

    def _send_outbox(self) -> bool:
        """Sends what other threads handed over; False if the link is to be closed."""
        while not self._outbox.empty():
            message = self._outbox.get()
            if message is None:
                if self._session is not None:
                    self._dealer.linger = 1000  # milliseconds for what is still unsent
                    bye = link_pb2.Envelope(bye=self._goodbye)
                    self._dealer.send(self._session.seal(bye), zmq.NOBLOCK)
                return False
            if message.session is self._session:
                self._dealer.send_multipart(message.frames, zmq.NOBLOCK)
                if message.finished_step is not None:  # never reported before the result is sent
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
            self._dealer.send(session.seal(link_pb2.Envelope(heartbeat=beat)), zmq.NOBLOCK)

    @property
    def _patience(self) -> float:
        """Seconds of silence after which a new socket and a new Hello are due."""
        return STANDBY_SECONDS if self._is_dismissed else self._peer_timeout

    def _is_silent(self) -> bool:
        return time.monotonic() - self._heard_at > self._patience

    def _over(self, reason: str) -> bool:
        if self._session is not None:
            logger.warning("session ended: %s; sending a new Hello", reason)
        self._end_session()
        return True

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.end()
            self._session = None
