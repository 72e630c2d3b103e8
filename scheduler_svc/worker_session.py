"""The engine's session with the worker: who is there, and what comes of what it says.

Hello is answered by the Configure, Ready gives the pool its size, results are checked and taken
in, a Fault or a lost worker puts the requests back. Everything runs in the engine's thread.

Owns: the status that is told of worker and model. Does not own: the socket (worker_link.py), what
is planned (engine.py), or what clients are told (answers.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from protos import link_pb2
from protos.plan import StepResult
from scheduler_svc.answers import Answers
from scheduler_svc.core.absorb import absorb, why_not_the_result
from scheduler_svc.core.admission import why_never_fits
from scheduler_svc.core.limits import Geometry, GroupGeometry
from scheduler_svc.core.state import State
from scheduler_svc.errors import ChairliftError, RequestFailed, Unavailable
from scheduler_svc.events import ModelFacts, Status
from scheduler_svc.step_feed import StepFeed
from scheduler_svc.worker_link import Link, WorkerMessage

logger = logging.getLogger(__name__)

MAX_FAULTS: Final = 2  # failed steps after which a request that was in each of them fails


class Fail(Protocol):
    """Ends a request with all its siblings; does nothing if it has ended."""

    def __call__(
        self, request_id: str, why: str, kind: type[ChairliftError] = RequestFailed
    ) -> None: ...


class WorkerSession:
    """See the module's docstring. `make_text` and `fail` are the engine's."""

    def __init__(
        self,
        state: State,
        answers: Answers,
        steps: StepFeed,
        link: Link,
        configure: link_pb2.Configure,
        make_text: Callable[[], None],
        fail: Fail,
        on_status: Callable[[Status], None],
        heartbeat_timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self.status = Status("connecting", None, None, 0, 0)
        self._state = state
        self._answers = answers
        self._steps = steps
        self._link = link
        self._configure = configure
        self._make_text = make_text
        self._fail = fail
        self._on_status = on_status
        self._heartbeat_timeout = heartbeat_timeout
        self._clock = clock
        self._last_heard = 0.0
        self._worker_boot_id = 0

    def look_after(self) -> None:
        """Ends the session of a worker that is silent for too long."""
        if self.status.worker in ("loading", "ready"):
            silence = self._clock() - self._last_heard
            if silence > self._heartbeat_timeout:
                self._lose_worker(f"nothing heard of it for {silence:.1f} s")

    def on_message(self, message: WorkerMessage) -> None:
        self._last_heard = self._clock()
        envelope = message.envelope
        kind = envelope.WhichOneof("message")
        if message.result is not None:
            self._on_result(message.result)
        elif kind == "hello":
            hello = envelope.hello
            self._worker_boot_id = envelope.worker_boot_id
            logger.info("worker on %s (pid %d, %s) connects", hello.host, hello.pid, hello.version)
            if self.status.is_ready:
                self._forget_worker("another one connects")
            self._set_status(worker="loading", fatal_error=None)
            self._link.send(link_pb2.Envelope(configure=self._configure))
        elif kind == "ready":
            self._on_ready(envelope.ready)
        elif kind == "fault":
            self._on_fault(envelope.fault)
        elif kind == "bye" and self.status.worker != "none":
            self._lose_worker(f"it says goodbye: {envelope.bye.reason or 'no reason given'}")

    def _on_result(self, result: StepResult) -> None:
        in_flight = self._state.in_flight
        if not self.status.is_ready or not in_flight or result.step_id < in_flight[0].step_id:
            return  # late: its plan was given up, with the worker or after a Fault
        mismatch = why_not_the_result(in_flight[0], result)
        if mismatch is not None:
            self._lose_worker(f"it answers wrongly: {mismatch}")
            return
        absorbed = absorb(self._state, result)
        self._steps.returned(result.step_id, result.device_microseconds)
        self._answers.take_in(absorbed.sampled, absorbed.ended)
        for request in absorbed.not_finite:
            self._fail(request.request_id, "its hidden states are not finite numbers")

    def _on_ready(self, ready: link_pb2.Ready) -> None:
        if not (ready.page_size > 0 and ready.groups and ready.max_model_len > 0) or any(
            group.blocks_per_chunk < 1 for group in ready.groups
        ):
            self._lose_worker(f"its Ready makes no sense: {ready}")
            return
        geometry = Geometry(
            page_size=ready.page_size,
            num_chunks=ready.num_chunks,
            chunk_bytes=ready.chunk_bytes,
            groups=tuple(
                GroupGeometry(
                    group.kind, len(group.layers), group.blocks_per_chunk, group.sliding_window
                )
                for group in ready.groups
            ),
            max_model_len=ready.max_model_len,
            num_swap_chunks=ready.num_swap_chunks,
            overlaps_swap=ready.overlaps_swap,
        )
        self._make_text()
        self._state.lose_worker(geometry)
        is_reserved = self._state.policy.holds_finished
        for answer in self._answers:
            request = answer.request
            max_tokens = request.max_total_tokens - request.num_prompt_tokens
            reason = why_never_fits(geometry, request.num_prompt_tokens, max_tokens, is_reserved)
            if reason is not None:
                why = f"the worker's memory is too small for it: {reason}"
                self._fail(request.request_id, why)
        pool_tokens = geometry.pool_tokens(is_reserved)
        model = ModelFacts(
            model_path=ready.model_path,
            model_type=ready.model_type,
            architecture=ready.architecture,
            vocab_size=ready.vocab_size,
            max_model_len=ready.max_model_len,
            pool_tokens=pool_tokens,
            dtype=ready.dtype,
            device=ready.device,
        )
        logger.info(
            "worker ready: %s on %s, %s, KV %s, attention %s, requests of up to %d tokens",
            ready.model_type,
            ready.device,
            ready.dtype,
            ready.kv_cache_dtype,
            ready.attention,
            pool_tokens,
        )
        self._set_status(worker="ready", model=model, fatal_error=None)

    def _on_fault(self, fault: link_pb2.Fault) -> None:
        if fault.is_fatal:
            logger.error("the worker gives up: %s", fault.error)
            self._make_text()
            self._state.lose_worker()
            for answer in self._answers:
                self._fail(answer.request.request_id, fault.error, Unavailable)
            self._set_status(worker="none", fatal_error=fault.error)
            return
        if not self.status.is_ready:
            return
        logger.error("step %d failed in the worker: %s", fault.step_id, fault.error)
        suspects = {
            request.request_id
            for step in self._state.in_flight
            if step.step_id == fault.step_id
            for request in step.requests
        }
        self._make_text()
        # steps are counted on, so that a result of a step before the fault is known as late
        self._state.lose_worker(self._state.geometry, self._state.next_step_id)
        for answer in self._answers:
            if answer.request.request_id in suspects:
                answer.num_faults += 1
                if answer.num_faults >= MAX_FAULTS:
                    why = f"the step that computes it fails: {fault.error}"
                    self._fail(answer.request.request_id, why)
        resume = link_pb2.Resume(next_step_id=self._state.next_step_id)
        self._link.send(link_pb2.Envelope(resume=resume))

    def _lose_worker(self, why: str) -> None:
        self._forget_worker(why)
        self._link.drop(self._worker_boot_id)
        self._set_status(worker="connecting")

    def _forget_worker(self, why: str) -> None:
        """Its requests wait for the next one, which may have the session already."""
        logger.warning(
            "worker lost: %s; %d requests wait for the next one", why, len(self._answers)
        )
        self._make_text()
        self._state.lose_worker()

    def count(self, num_running: int, num_waiting: int) -> None:
        """Brings the status up to date with the requests; nobody is told."""
        if (num_running, num_waiting) != (self.status.num_running, self.status.num_waiting):
            self.status = replace(self.status, num_running=num_running, num_waiting=num_waiting)

    def _set_status(self, **changes: object) -> None:
        self.status = replace(self.status, **changes)  # type: ignore[arg-type]
        self._on_status(self.status)
