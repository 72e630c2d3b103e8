"""The scheduler's end of the worker link: a ROUTER socket, owned by one I/O thread.

Other threads put messages into its outbox; it calls `on_message`, which must only enqueue. A Hello
begins a session, `drop` ends it. The thread filters by session, so that the engine never sees a
message left over from a former worker, and sends heartbeats in every session. Which worker serves
is up to the engine.

Nothing that a worker sends ends the thread. An unreadable message or a closed connection is
reported as an error of the session.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from protos import link_pb2
from protos.link import HEARTBEAT_SECONDS, PROTOCOL
from protos.plan import (
    StepPlan,
    StepResult,
    decode_result,
    encode_plan,
)
from scheduler_svc.engine.ipc_lock import IpcLock

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES: Final = 256 << 20  # a larger one closes the connection; results are far smaller
MAX_SESSIONS: Final = 64


@dataclass(frozen=True, slots=True)
class _Drop:
    """End this session; the worker is sent the reason, if there is one."""

    worker_boot_id: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class _Send:
    """Send frames to a worker; ignored if it has no session."""

    worker_boot_id: int
    frames: list[bytes]


class _Stop:
    """End the I/O thread."""


_Order = _Send | _Drop | _Stop


@dataclass(frozen=True, slots=True)
class WorkerMessage:
    """A message of a worker in its session; `result` is set for a StepResult.

    `error` says why the session cannot continue; the envelope then only names the worker.
    `is_alive`: the worker still sends, but its messages are invalid.
    """

    envelope: link_pb2.Envelope
    result: StepResult | None = None
    error: str | None = None
    is_alive: bool = False


class WorkerLink:
    """Binds `address` (ipc:// or tcp://). `boot_id` identifies this scheduler process, never 0.

    With `server_key` (a CURVE secret key file, see zmq.auth.create_certificates) the link is
    encrypted and accepts only workers whose public keys are in the folder `client_keys`. A tcp://
    address needs it: anyone who can reach the socket could otherwise read every prompt.
    """

    def __init__(
        self,
        address: str,
        boot_id: int,
        server_key: Path | None = None,
        client_keys: Path | None = None,
    ) -> None:
        self.address = address
        self.boot_id = boot_id
        self._server_key = server_key
        self._client_keys = client_keys
        self._outbox: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._wake_receiver, self._wake_sender = os.pipe()
        self._thread: threading.Thread | None = None
        self._sessions: dict[int, bytes] = {}  # boot_id of the worker → identity of its connection
        self._lock: IpcLock | None = None  # on the address

    def start(
        self,
        on_message: Callable[[WorkerMessage], None],
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Binds and starts the I/O thread, which calls both. Raises OSError when the address
        cannot be bound; `on_death` gets the error that ended the thread."""
        self._on_message = on_message
        path = self.address.removeprefix("ipc://")
        if path != self.address and not path.startswith("@"):
            try:
                self._lock = IpcLock(path)
            except OSError as error:
                raise OSError(
                    f"worker_address {self.address} cannot be bound: {error}. Stop that process, "
                    "or choose another address with --worker-address"
                ) from error
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.router_mandatory = True  # sending to a closed connection is an error
        router.maxmsgsize = MAX_FRAME_BYTES
        authenticator = self._authenticator(context)  # before anybody can connect
        self._secure(router)
        try:
            router.bind(self.address)
        except zmq.ZMQError as error:
            if authenticator is not None:
                authenticator.stop()
            context.destroy()
            self._unlock()
            raise OSError(f"worker_address {self.address} cannot be bound: {error}") from error
        if self._lock is not None:
            os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
        self._thread = threading.Thread(
            target=self._run,
            args=(context, router, authenticator, on_death),
            name="worker-link",
            daemon=True,
        )
        self._thread.start()

    def send(self, message: link_pb2.Envelope, plan: StepPlan | None = None) -> None:
        """Thread-safe. Ignored if the worker that the message names has no session."""
        frames = [b""]
        if plan is not None:
            counts, buffer = encode_plan(plan)
            message.step_plan.step_id = plan.step_id
            message.step_plan.awaits_mask = plan.awaits_mask
            message.step_plan.counts.extend(counts)
            frames.append(buffer)
        message.scheduler_boot_id = self.boot_id
        frames[0] = message.SerializeToString()
        self._hand_over(_Send(message.worker_boot_id, frames))

    def drop(self, worker_boot_id: int, reason: str | None = None) -> None:
        """Ends a worker's session; the reason, if any, is the last it is sent, in a Bye."""
        self._hand_over(_Drop(worker_boot_id, reason))

    def stop(self) -> None:
        """Sends Bye to the workers and closes the socket."""
        if self._thread is None:
            return
        self._hand_over(_Stop())
        self._thread.join()
        self._thread = None
        self._unlock()
        os.close(self._wake_sender)
        os.close(self._wake_receiver)

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _hand_over(self, order: _Order) -> None:
        self._outbox.put(order)
        os.write(self._wake_sender, b".")

    def _secure(self, router: zmq.Socket[bytes]) -> None:
        if self._server_key is None:
            return
        public, secret = zmq.auth.load_certificate(self._server_key)
        router.curve_publickey, router.curve_secretkey = public, secret
        router.curve_server = True

    # In the I/O thread

    def _run(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        authenticator: ThreadAuthenticator | None,
        on_death: Callable[[BaseException], None] | None,
    ) -> None:
        try:
            self._serve(router)
        except BaseException as error:  # without this thread no message arrives any more
            logger.critical("worker link crashed: %s", error, exc_info=error)
            if on_death is not None:
                on_death(error)
        finally:
            if authenticator is not None:
                authenticator.stop()
            context.destroy(linger=500)

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(self._wake_receiver, zmq.POLLIN)
        next_beat = time.monotonic()
        while True:
            wait = max(0.0, next_beat - time.monotonic())
            ready = dict(poller.poll(int(wait * 1000) + 1))
            if self._wake_receiver in ready:
                os.read(self._wake_receiver, 4096)
                if not self._process_outbox(router):
                    return
            if router in ready:
                message = self._receive(router)
                if message is not None:
                    self._on_message(message)
            if time.monotonic() >= next_beat:
                for boot_id in list(self._sessions):
                    beat = link_pb2.Envelope(heartbeat=link_pb2.Heartbeat(busy="idle"))
                    self._send_message(router, boot_id, beat)
                next_beat = time.monotonic() + HEARTBEAT_SECONDS

    def _process_outbox(self, router: zmq.Socket[bytes]) -> bool:
        """Returns False when the thread must end."""
        while not self._outbox.empty():
            order = self._outbox.get()
            if isinstance(order, _Stop):
                for boot_id in list(self._sessions):
                    self._send_message(router, boot_id, _bye("the scheduler is stopping"))
                return False
            if isinstance(order, _Send):
                self._send_frames(router, order.worker_boot_id, order.frames)
                continue
            if order.reason is not None:
                self._send_message(router, order.worker_boot_id, _bye(order.reason))
            self._sessions.pop(order.worker_boot_id, None)
        return True

    def _authenticator(self, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator | None:
        if self._server_key is None or self._client_keys is None:
            return None
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve(domain="*", location=str(self._client_keys))
        return authenticator

    def _send_message(
        self, router: zmq.Socket[bytes], boot_id: int, message: link_pb2.Envelope
    ) -> None:
        message.scheduler_boot_id = self.boot_id
        message.worker_boot_id = boot_id
        self._send_frames(router, boot_id, [message.SerializeToString()])

    def _send_frames(self, router: zmq.Socket[bytes], boot_id: int, frames: list[bytes]) -> None:
        identity = self._sessions.get(boot_id)
        if identity is None:
            return
        try:
            router.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.Again:
            self._end(boot_id, "it does not read its messages")
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._end(boot_id, "its connection is closed")

    def _end(self, boot_id: int, why: str, is_alive: bool = False) -> None:
        """Ends a session from this side, and reports why."""
        del self._sessions[boot_id]
        envelope = link_pb2.Envelope(worker_boot_id=boot_id)
        self._on_message(WorkerMessage(envelope, error=why, is_alive=is_alive))

    def _receive(self, router: zmq.Socket[bytes]) -> WorkerMessage | None:
        try:
            identity, *frames = router.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        try:
            return self._read(router, identity, frames)
        except Exception as error:  # whatever a worker sends must not affect the others
            why = f"a message of {sum(map(len, frames))} bytes cannot be read: {error}"[:500]
            for boot_id, known in self._sessions.items():
                if known == identity:
                    envelope = link_pb2.Envelope(worker_boot_id=boot_id)
                    return WorkerMessage(envelope, error=why, is_alive=True)
            logger.debug("dropped outside any session: %s", why)
            return None

    def _read(
        self, router: zmq.Socket[bytes], identity: bytes, frames: list[bytes]
    ) -> WorkerMessage | None:
        envelope = link_pb2.Envelope.FromString(frames[0])
        kind = envelope.WhichOneof("message")
        boot_id = envelope.worker_boot_id
        if kind == "hello":
            return self._greet(router, identity, envelope)
        if self._sessions.get(boot_id) != identity:
            logger.debug("dropped %s of worker %x: another session", kind, boot_id)
            return None
        if envelope.scheduler_boot_id != self.boot_id:
            logger.debug("dropped %s: meant for scheduler %x", kind, envelope.scheduler_boot_id)
            return None
        if kind != "step_result":
            return WorkerMessage(envelope)
        header = envelope.step_result
        result = decode_result(
            header.step_id,
            header.device_microseconds,
            header.queue_microseconds,
            header.counts,
            frames[1] if len(frames) > 1 else b"",
        )
        return WorkerMessage(envelope, result)

    def _greet(
        self, router: zmq.Socket[bytes], identity: bytes, envelope: link_pb2.Envelope
    ) -> WorkerMessage | None:
        hello, boot_id = envelope.hello, envelope.worker_boot_id
        if boot_id in self._sessions or len(self._sessions) >= MAX_SESSIONS:
            return None  # repeated while our answer was on its way; or too many
        for known, connection in list(self._sessions.items()):
            if connection == identity:
                self._end(known, "it began another session", is_alive=True)
        self._sessions[boot_id] = identity
        if hello.protocol == PROTOCOL:
            return WorkerMessage(envelope)
        reason = f"the worker speaks protocol {hello.protocol}, the scheduler {PROTOCOL}"
        if not hello.is_standby:  # else it was refused before, and retries
            logger.error("refused a worker on %s (pid %d): %s", hello.host, hello.pid, reason)
            self._send_message(router, boot_id, _bye(reason))
        self._sessions.pop(boot_id, None)
        return None


def _bye(reason: str) -> link_pb2.Envelope:
    return link_pb2.Envelope(bye=link_pb2.Bye(reason=reason))
