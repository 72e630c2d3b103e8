"""A session with one scheduler: plans and masks in, results and faults out, in order.

Owns: the routing of messages by kind, the order of steps, the encoding of answers. Does not own:
the socket (link.py), what a plan means and what the main thread does with it (loop.py).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from protos import link_pb2
from protos.plan import LayoutError, StepPlan, StepResult, decode_plan, encode_result

logger = logging.getLogger(__name__)


class SessionEnded(Exception):
    """The scheduler of this session is gone; `SchedulerLink.accept` returns the next one."""


class PlanRefused(Exception):
    """A plan that cannot run: out of order, or not laid out as protos/plan.py says."""

    def __init__(self, step_id: int, reason: str) -> None:
        super().__init__(reason)
        self.step_id = step_id


class Received(NamedTuple):
    """A plan, and when it was read from the socket (time.monotonic seconds)."""

    plan: StepPlan
    at: float


class _EncodedPlan(NamedTuple):
    header: link_pb2.StepPlan
    buffer: bytes
    at: float


class Outgoing(NamedTuple):
    """A message for the I/O thread to send while its session lasts."""

    session: Session
    frames: list[bytes]
    finished_step: int | None = None  # the step whose result it is


class Session:
    """The main thread's view of one scheduler. `hand_over` passes messages to the I/O thread, which
    drops them once the session has ended; then `receive` raises SessionEnded."""

    def __init__(
        self,
        hand_over: Callable[[Outgoing], None],
        scheduler_boot_id: int,
        worker_boot_id: int,
        configure: link_pb2.Configure,
    ) -> None:
        self.configure = configure
        self.scheduler_boot_id = scheduler_boot_id
        self.worker_boot_id = worker_boot_id
        self.last_finished_step = -1  # none yet
        self.has_ended = False
        self._hand_over = hand_over
        # in the order in which they came: a Resume counts from its place among the plans
        self._inbox: queue.SimpleQueue[_EncodedPlan | link_pb2.Resume | None] = queue.SimpleQueue()
        self._next_step_id: int | None = None  # the scheduler chooses the first one
        # Masks that nobody has waited for yet, by step: they overtake the plans in the inbox.
        self._masks: dict[int, link_pb2.Mask] = {}
        self._mask_came = threading.Condition()

    def receive(self) -> Received:
        """Waits for the next plan. Raises SessionEnded, or PlanRefused for a plan that is out of
        order or does not fit the layout."""
        while not isinstance(message := self._next(), _EncodedPlan):
            logger.warning("ignored Resume: no step has failed")
        header, expected = message.header, self._next_step_id
        if expected is not None and header.step_id != expected:
            raise PlanRefused(
                header.step_id, f"received step {header.step_id}, expected {expected}"
            )
        try:
            plan = decode_plan(header.step_id, header.awaits_mask, header.counts, message.buffer)
        except LayoutError as error:
            raise PlanRefused(header.step_id, f"step {header.step_id}: {error}") from error
        self._next_step_id = header.step_id + 1
        if self._masks:
            self._drop_masks(header.step_id)
        return Received(plan, message.at)

    def wait_for_mask(self, step_id: int) -> link_pb2.Mask:
        """Waits for the mask of a plan that was received. Those of earlier steps, which were
        discarded or awaited none, are dropped. Raises SessionEnded."""
        with self._mask_came:
            self._mask_came.wait_for(lambda: self.has_ended or step_id in self._masks)
            if self.has_ended:
                raise SessionEnded
            mask = self._masks[step_id]
            self._masks = {step: kept for step, kept in self._masks.items() if step > step_id}
        return mask

    def _drop_masks(self, first_step_id: int) -> None:
        """Those of steps before `first_step_id`."""
        with self._mask_came:
            kept = {step: mask for step, mask in self._masks.items() if step >= first_step_id}
            if len(kept) < len(self._masks):
                dropped = sorted(self._masks.keys() - kept.keys())
                logger.debug("dropped the masks of steps %s, which nobody awaited", dropped)
                self._masks = kept

    def wait_for_resume(self) -> int:
        """Discards plans until a Resume; returns their number. Raises SessionEnded."""
        num_discarded = 0
        while not isinstance(message := self._next(), link_pb2.Resume):
            num_discarded += 1
        self._next_step_id = message.next_step_id
        return num_discarded

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
        frames = [self.seal(link_pb2.Envelope(step_result=header)), buffer]
        self._hand_over(Outgoing(self, frames, result.step_id))

    def send_fault(self, step_id: int, error: str, is_fatal: bool = False) -> None:
        """`step_id` -1: not in a step. `is_fatal`: this process exits, and so would a new one."""
        fault = link_pb2.Fault(step_id=step_id, error=error, is_fatal=is_fatal)
        self._send(link_pb2.Envelope(fault=fault))

    def _send(self, envelope: link_pb2.Envelope) -> None:
        self._hand_over(Outgoing(self, [self.seal(envelope)]))

    def seal(self, envelope: link_pb2.Envelope) -> bytes:
        """The serialized envelope, as a message of this session."""
        envelope.scheduler_boot_id = self.scheduler_boot_id
        envelope.worker_boot_id = self.worker_boot_id
        return envelope.SerializeToString()

    def _next(self) -> _EncodedPlan | link_pb2.Resume:
        message = None if self.has_ended else self._inbox.get()
        if message is None:
            raise SessionEnded
        return message

    # Called by the I/O thread

    def deliver(self, envelope: link_pb2.Envelope, buffer: bytes, at: float) -> bool:
        """Routes a message by its kind; False for one that has no place in a session."""
        match envelope.WhichOneof("message"):
            case "step_plan":
                self._inbox.put(_EncodedPlan(envelope.step_plan, buffer, at))
            case "resume":
                self._inbox.put(envelope.resume)
            case "mask":
                with self._mask_came:
                    self._masks[envelope.mask.step_id] = envelope.mask
                    self._mask_came.notify()
            case "heartbeat":
                pass  # any message shows that the scheduler is alive
            case _:
                return False
        return True

    def end(self) -> None:
        with self._mask_came:
            self.has_ended = True
            self._mask_came.notify()
        self._inbox.put(None)
