"""The scheduler's end of the worker link: a ROUTER socket, owned by one I/O thread.

Others hand messages over to that thread and are called back from it (`on_message`, which must
only enqueue). It filters by session, so that the engine never sees a message that a former worker
left behind, and beats the heart in both directions; what to do about it is the engine's business.

The newest Hello wins: whoever says it becomes *the* worker, and the one before is told Bye.
"""

from __future__ import annotations

import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import zmq
import zmq.auth
from google.protobuf.message import DecodeError
from zmq.auth.thread import ThreadAuthenticator

from protos import link_pb2
from protos.plan import (
    LayoutError,
    StepPlan,
    StepResult,
    decode_result,
    encode_plan,
)

logger = logging.getLogger(__name__)

PROTOCOL: Final = 1
HEARTBEAT_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class _Drop:
    """End this session, unless another one has begun."""

    worker_boot_id: int


class _Stop:
    """End the I/O thread."""


_Order = list[bytes] | _Drop | _Stop  # frames to send, or one of the two


@dataclass(frozen=True, slots=True)
class WorkerMessage:
    """What a worker of the current session says; `result` is set for a StepResult."""

    envelope: link_pb2.Envelope
    result: StepResult | None = None


class Link(Protocol):
    """What the engine needs of a link; a memory link in tests stands in for it."""

    def start(self, on_message: Callable[[WorkerMessage], None]) -> None: ...

    def send(self, message: link_pb2.Envelope, plan: StepPlan | None = None) -> None:
        """To the current worker; nothing happens if there is none."""
        ...

    def drop(self, worker_boot_id: int) -> None:
        """Ends this worker's session: it hears nothing more, and says Hello again if it lives."""
        ...

    def stop(self) -> None: ...


class WorkerLink:
    """Binds `address` (ipc:// or tcp://). `boot_id` names this life of the scheduler, never 0.

    With `server_key` (a CURVE secret key file, see zmq.auth.create_certificates) the link is
    encrypted and takes only workers whose public keys lie in `client_keys`. A tcp:// address
    needs it: whoever reaches the socket could otherwise read every prompt.
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
        self._worker: tuple[bytes, int] | None = None  # identity and boot_id of the session

    def start(self, on_message: Callable[[WorkerMessage], None]) -> None:
        """Binds and starts the I/O thread. Raises OSError when the address cannot be bound."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = context.socket(zmq.ROUTER)
        authenticator = self._authenticator(context)  # before anybody can connect
        self._secure(router)
        try:
            router.bind(self.address)
        except zmq.ZMQError as error:
            if authenticator is not None:
                authenticator.stop()
            context.destroy()
            raise OSError(f"worker_address {self.address} cannot be bound: {error}") from error
        if self.address.startswith("ipc://"):
            os.chmod(self.address.removeprefix("ipc://"), stat.S_IRUSR | stat.S_IWUSR)
        self._thread = threading.Thread(
            target=self._run,
            args=(context, router, authenticator, on_message),
            name="worker-link",
            daemon=True,
        )
        self._thread.start()

    def send(self, message: link_pb2.Envelope, plan: StepPlan | None = None) -> None:
        """From any thread; the session's ids are filled in by the I/O thread."""
        frames = [b""]
        if plan is not None:
            counts, buffer = encode_plan(plan)
            message.step_plan.step_id = plan.step_id
            message.step_plan.awaits_mask = plan.awaits_mask
            message.step_plan.counts.extend(counts)
            frames.append(buffer)
        message.scheduler_boot_id = self.boot_id
        frames[0] = message.SerializeToString()
        self._hand_over(frames)

    def drop(self, worker_boot_id: int) -> None:
        self._hand_over(_Drop(worker_boot_id))

    def stop(self) -> None:
        """Says Bye to the worker and closes the socket."""
        if self._thread is None:
            return
        self.send(link_pb2.Envelope(bye=link_pb2.Bye(reason="the scheduler stops")))
        self._hand_over(_Stop())
        self._thread.join()
        self._thread = None
        os.close(self._wake_sender)
        os.close(self._wake_receiver)

    def _hand_over(self, order: _Order) -> None:
        self._outbox.put(order)
        os.write(self._wake_sender, b".")

    def _secure(self, router: zmq.Socket[bytes]) -> None:
        if self._server_key is None:
            return
        public, secret = zmq.auth.load_certificate(self._server_key)
        router.curve_publickey, router.curve_secretkey = public, secret
        router.curve_server = True

    def _run(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        authenticator: ThreadAuthenticator | None,
        on_message: Callable[[WorkerMessage], None],
    ) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(self._wake_receiver, zmq.POLLIN)
        heartbeat = link_pb2.Envelope(
            scheduler_boot_id=self.boot_id, heartbeat=link_pb2.Heartbeat(busy="idle")
        ).SerializeToString()
        next_beat = time.monotonic()
        try:
            while True:
                wait = max(0.0, next_beat - time.monotonic())
                ready = dict(poller.poll(int(wait * 1000) + 1))
                if self._wake_receiver in ready:
                    os.read(self._wake_receiver, 4096)
                    if not self._send_all(router):
                        return
                if router in ready:
                    message = self._receive(router)
                    if message is not None:
                        on_message(message)
                if time.monotonic() >= next_beat:
                    self._to_worker(router, [heartbeat])
                    next_beat = time.monotonic() + HEARTBEAT_SECONDS
        finally:
            if authenticator is not None:
                authenticator.stop()
            context.destroy(linger=500)

    def _send_all(self, router: zmq.Socket[bytes]) -> bool:
        """Sends what others handed over; False once the thread is to end."""
        while not self._outbox.empty():
            order = self._outbox.get()
            if isinstance(order, _Stop):
                return False
            if isinstance(order, _Drop):
                if self._worker is not None and self._worker[1] == order.worker_boot_id:
                    self._worker = None
            else:
                self._to_worker(router, order)
        return True

    def _authenticator(self, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator | None:
        if self._server_key is None or self._client_keys is None:
            return None
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve(domain="*", location=str(self._client_keys))
        return authenticator

    def _to_worker(self, router: zmq.Socket[bytes], frames: list[bytes]) -> None:
        if self._worker is None:
            return
        identity, boot_id = self._worker
        # protobuf fields may be appended: the last one wins, so the session is added here
        session = link_pb2.Envelope(worker_boot_id=boot_id).SerializeToString()
        router.send_multipart([identity, frames[0] + session, *frames[1:]])

    def _receive(self, router: zmq.Socket[bytes]) -> WorkerMessage | None:
        identity, *frames = router.recv_multipart()
        try:
            envelope = link_pb2.Envelope.FromString(frames[0])
        except DecodeError:
            logger.warning("dropped a frame that is no Envelope (%d bytes)", len(frames[0]))
            return None
        kind = envelope.WhichOneof("message")
        if kind == "hello":
            return self._greet(router, identity, envelope)
        if self._worker != (identity, envelope.worker_boot_id):
            logger.debug("dropped %s of worker %x: another session", kind, envelope.worker_boot_id)
            return None
        if envelope.scheduler_boot_id != self.boot_id:
            logger.debug("dropped %s: meant for scheduler %x", kind, envelope.scheduler_boot_id)
            return None
        if kind != "step_result":
            return WorkerMessage(envelope)
        header = envelope.step_result
        try:
            result = decode_result(
                header.step_id,
                header.device_microseconds,
                header.queue_microseconds,
                header.counts,
                frames[1] if len(frames) > 1 else b"",
            )
        except LayoutError as error:
            logger.error("dropped the result of step %d: %s", header.step_id, error)
            return None
        return WorkerMessage(envelope, result)

    def _greet(
        self, router: zmq.Socket[bytes], identity: bytes, envelope: link_pb2.Envelope
    ) -> WorkerMessage | None:
        hello = envelope.hello
        if hello.protocol != PROTOCOL:
            reason = f"the worker speaks protocol {hello.protocol}, the scheduler {PROTOCOL}"
            logger.error("refused a worker on %s (pid %d): %s", hello.host, hello.pid, reason)
            bye = link_pb2.Envelope(
                scheduler_boot_id=self.boot_id,
                worker_boot_id=envelope.worker_boot_id,
                bye=link_pb2.Bye(reason=reason),
            )
            router.send_multipart([identity, bye.SerializeToString()])
            return None
        if self._worker == (identity, envelope.worker_boot_id):
            return None  # said again while our answer was on its way
        if self._worker is not None:
            reason = f"the worker on {hello.host}, pid {hello.pid}, took over"
            farewell = link_pb2.Envelope(
                scheduler_boot_id=self.boot_id, bye=link_pb2.Bye(reason=reason)
            )
            self._to_worker(router, [farewell.SerializeToString()])
        self._worker = (identity, envelope.worker_boot_id)
        return WorkerMessage(envelope)
