"""The scheduler's end of the link, as far as a worker can see it: a ROUTER driven by the test."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import zmq

from protos import link_pb2
from protos.plan import (
    PLAN_LAYOUT,
    StepPlan,
    StepResult,
    decode_result,
    encode_plan,
)

SECONDS = 60.0  # more than any answer takes on a busy machine


def make_plan(step_id: int, **arrays: list[int]) -> StepPlan:
    """A plan whose arrays are empty but for `arrays` (the offsets that begin at 0 included)."""
    empty: dict[str, Any] = {}
    for name, dtype, shape in PLAN_LAYOUT:
        lengths = [d if isinstance(d, int) else int(d.endswith("+1")) for d in shape]
        empty[name] = np.zeros(lengths, dtype)
    plan = StepPlan.from_arrays(step_id, False, empty)
    given = {name: np.array(values, np.int32) for name, values in arrays.items()}
    return dataclasses.replace(plan, **given)


class FakeScheduler:
    """One life of a scheduler. Sends to the worker whose Hello came last."""

    def __init__(
        self,
        address: str,
        boot_id: int = 7,
        curve: tuple[bytes, bytes] | None = None,
        beats: bool = False,
    ) -> None:
        """`beats`: heartbeats are answered, so that a slow worker does not take it for dead."""
        self.boot_id = boot_id
        self._beats = beats
        self.hello = link_pb2.Envelope()
        self.buffer = b""  # second frame of what was received last
        self._identity = b""
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        if curve is not None:
            self._router.curve_server = True
            self._router.curve_publickey, self._router.curve_secretkey = curve
        self._router.bind(address)

    def receive(self, kind: str) -> link_pb2.Envelope:
        """The next message of that kind; heartbeats before it are skipped, nothing else is."""
        deadline = time.monotonic() + SECONDS
        while (seconds := deadline - time.monotonic()) > 0:
            envelope = self.receive_any(seconds)
            if envelope is None:
                break
            got = envelope.WhichOneof("message")
            if got == kind:
                return envelope
            assert got == "heartbeat", f"got {got} where {kind} was expected: {envelope}"
            if self._beats:
                self.send(heartbeat=link_pb2.Heartbeat())
        raise AssertionError(f"no {kind} within {SECONDS:g} s")

    def receive_any(self, seconds: float) -> link_pb2.Envelope | None:
        if not self._router.poll(1000 * seconds):
            return None
        identity, frame, *buffers = self._router.recv_multipart()
        envelope = link_pb2.Envelope.FromString(frame)
        self.buffer = buffers[0] if buffers else b""
        if envelope.WhichOneof("message") == "hello":
            self.hello, self._identity = envelope, identity
        return envelope

    def receive_result(self) -> StepResult:
        header = self.receive("step_result").step_result
        return decode_result(
            header.step_id,
            header.device_microseconds,
            header.queue_microseconds,
            header.counts,
            self.buffer,
        )

    def send(self, *buffer: bytes, **message: Any) -> None:
        """E.g. `send(resume=link_pb2.Resume(next_step_id=3))`; the ids may be given too."""
        ids = {"scheduler_boot_id": self.boot_id, "worker_boot_id": self.hello.worker_boot_id}
        envelope = link_pb2.Envelope(**(ids | message))
        self._router.send_multipart([self._identity, envelope.SerializeToString(), *buffer])

    def send_plan(self, plan: StepPlan, **ids: int) -> None:
        counts, buffer = encode_plan(plan)
        header = link_pb2.StepPlan(
            step_id=plan.step_id, counts=counts, awaits_mask=plan.awaits_mask
        )
        self.send(buffer, step_plan=header, **ids)

    def configure(self, **settings: Any) -> link_pb2.Envelope:
        """Waits for a Hello, answers it, and returns it."""
        hello = self.receive("hello")
        self.send(configure=link_pb2.Configure(**settings))
        return hello

    def close(self) -> None:
        self._router.close()
        self._context.term()
