"""The engine: one thread owns the scheduler's state; everybody else posts commands to it.

    commands, worker messages → absorb → decide → commit → pack → send → text → events

Text is made after the next plan has been sent, so that the worker does not wait for it. A stop
string is therefore found when the next step may already compute the row; what that step samples
is dropped, as after an EOS under run-ahead.

Owns: the state and the session with the worker. Does not own: what is told to clients
(answers.py), sockets (worker_link.py), streams and statuses (streams.py, statuses.py).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Final, TypeVar

from protos import link_pb2
from protos.plan import StepResult
from scheduler_svc.answers import Answers
from scheduler_svc.core.absorb import absorb, why_not_the_result
from scheduler_svc.core.admission import why_never_fits
from scheduler_svc.core.check import InvariantError, check
from scheduler_svc.core.commit import commit
from scheduler_svc.core.decide import decide
from scheduler_svc.core.limits import Geometry, GroupGeometry, Limits
from scheduler_svc.core.pack import pack
from scheduler_svc.core.policies import FIFO, Policy
from scheduler_svc.core.request import FinishReason, RequestState
from scheduler_svc.core.state import State
from scheduler_svc.core.views import count_by_state
from scheduler_svc.errors import (
    ChairliftError,
    DuplicateRequest,
    QueueFull,
    RequestFailed,
    RequestRejected,
    Unavailable,
)
from scheduler_svc.events import Event, ModelFacts, Status, Submission, TextStream
from scheduler_svc.step_feed import StepFeed
from scheduler_svc.worker_link import Link, WorkerMessage

logger = logging.getLogger(__name__)

T = TypeVar("T")
Command = Callable[[], None]

TICK_SECONDS: Final = 0.25  # how often a silent worker is looked at
BEHIND_SECONDS: Final = 0.01  # how soon to go on with deltas that could not be told of at once
MAX_FAULTS: Final = 2  # failed steps after which a request that was in each of them fails


class Engine:
    """Serves requests through whatever worker is there; see the module's docstring."""

    def __init__(
        self,
        limits: Limits,
        configure: link_pb2.Configure,
        link: Link,
        deliver: Callable[[list[Event]], None],
        on_status: Callable[[Status], None],
        *,
        policy: Policy = FIFO,
        max_queue_size: int = 0,
        heartbeat_timeout: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deliver` gets the events of a step, `on_status` a changed Status, both in the
        engine's thread; neither may block. `max_queue_size` bounds waiting requests; 0 = no bound.
        """
        self.status = Status("connecting", None, None, 0, 0)
        self.steps = StepFeed(clock)
        self._limits = limits
        self._configure = configure
        self._link = link
        self._deliver = deliver
        self._on_status = on_status
        self._max_queue_size = max_queue_size
        self._heartbeat_timeout = heartbeat_timeout
        self._clock = clock
        self._state = State(limits, policy=policy)
        self._answers = Answers(clock)
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._last_heard = 0.0
        self._worker_boot_id = 0
        self._is_checked = True  # since the last change

    # From any thread

    def start(self, on_crash: Callable[[BaseException], None] | None = None) -> None:
        """Binds the link and starts the thread; `on_crash` is told of a broken invariant."""
        self._link.start(lambda message: self._inbox.put(lambda: self.on_worker(message)))
        self._thread = threading.Thread(target=self._run, args=(on_crash,), name="engine")
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and the link; live requests fail as UNAVAILABLE."""
        self._inbox.put(self._stop)
        if self._thread is not None:
            self._thread.join()
        self._link.stop()

    def submit(self, submission: Submission) -> None:
        """Takes a request; what becomes of it comes as events."""
        self._inbox.put(lambda: self.on_submit(submission))

    def abort(self, request_ids: Sequence[str]) -> Future[list[str]]:
        """Ends those of the requests that are live, and says which they were."""
        return self._call(lambda: self.on_abort(request_ids))

    def ask(self, question: Callable[[State], T]) -> Future[T]:
        """Reads the state in the engine's thread, between two steps."""
        return self._call(lambda: question(self._state))

    def flush_cache(self) -> Future[int]:
        """Empties the prefix cache; how many blocks lost their content's name."""
        return self._call(self.on_flush_cache)

    def _call(self, function: Callable[[], T]) -> Future[T]:
        answer: Future[T] = Future()

        def command() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function())
            except Exception as error:  # the asker's, not the engine's
                answer.set_exception(error)

        self._inbox.put(command)
        return answer

    # In the engine's thread

    def _run(self, on_crash: Callable[[BaseException], None] | None) -> None:
        try:
            while not self._is_stopping:
                self.turn(TICK_SECONDS)
        except BaseException as error:
            logger.critical("the engine stops: %s: %s", type(error).__name__, error, exc_info=True)
            if on_crash is None:
                raise
            on_crash(error)

    def turn(self, timeout: float) -> None:
        """Waits for a command, obeys all that are there, plans, makes text, delivers."""
        if self._answers.is_behind:
            timeout = min(timeout, BEHIND_SECONDS)
        try:
            self._inbox.get(timeout=timeout)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass
        if self.status.worker in ("loading", "ready"):
            silence = self._clock() - self._last_heard
            if silence > self._heartbeat_timeout:
                self._lose_worker(f"nothing heard of it for {silence:.1f} s")
        self._plan()
        self._make_text()
        events = self._answers.take_events()
        if events:
            self._deliver(events)
        self._update_status()
        if not self._state.requests and not self._state.in_flight and not self._is_checked:
            check(self._state)
            self._is_checked = True

    def on_submit(self, submission: Submission) -> None:
        new = submission.new
        try:
            self._check_new(submission)
        except ChairliftError as error:
            self._answers.refuse(new.request_id, error)
            return
        family = self._state.submit(new)
        texts: Sequence[TextStream | None] = submission.texts or [None] * len(family)
        for request, text in zip(family, texts, strict=True):
            self._answers.begin(request, text)
        self._is_checked = False

    def _check_new(self, submission: Submission) -> None:
        new = submission.new
        if new.request_id in self._answers:
            raise DuplicateRequest(new.request_id)
        if self.status.fatal_error is not None:
            raise Unavailable(f"no worker can serve the model: {self.status.fatal_error}")
        waiting = len(self._state.pending)
        if self._max_queue_size and waiting >= self._max_queue_size:
            raise QueueFull(waiting, self._max_queue_size)
        if new.n > 1 and self._state.policy.holds_finished:
            raise RequestRejected("sampling.n", new.n, "1, when scheduler_type is static")
        if self.status.is_ready:
            reason = self._why_never_fits(len(new.prompt_token_ids), new.max_tokens)
            if reason is not None:
                raise RequestRejected("max_tokens", new.max_tokens, f"fewer: {reason}")

    def _why_never_fits(self, prompt_tokens: int, max_tokens: int) -> str | None:
        state = self._state
        is_reserved = state.policy.holds_finished
        return why_never_fits(state.geometry, prompt_tokens, max_tokens, is_reserved)

    def on_abort(self, request_ids: Sequence[str]) -> list[str]:
        self._make_text()  # else one that has just ended would end without its last tokens
        aborted = [request_id for request_id in request_ids if request_id in self._answers]
        for request_id in dict.fromkeys(aborted):
            for answer in self._answers.family(request_id):
                if answer.request.state is not RequestState.FINISHED:
                    self._state.finish(answer.request, FinishReason.ABORT)
                self._answers.end(answer)
        return aborted

    def on_flush_cache(self) -> int:
        self._is_checked = False
        return self._state.flush_cache()

    def on_worker(self, message: WorkerMessage) -> None:
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
        self.steps.returned(result.step_id, result.device_microseconds)
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
            device=ready.device,
        )
        self._make_text()
        self._state.lose_worker(geometry)
        for answer in self._answers:
            request = answer.request
            max_tokens = request.max_total_tokens - request.num_prompt_tokens
            reason = self._why_never_fits(request.num_prompt_tokens, max_tokens)
            if reason is not None:
                why = f"the worker's memory is too small for it: {reason}"
                self._fail(request.request_id, why)
        pool_tokens = geometry.pool_tokens(self._state.policy.holds_finished)
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

    def _plan(self) -> None:
        if not self.status.is_ready:
            return
        while len(self._state.in_flight) < self._limits.max_plans_in_flight:
            decision = decide(self._state)
            step = commit(self._state, decision)
            if step is not None:
                self._is_checked = False
                for admission in decision.admissions:
                    self._answers.note_scheduled(admission.request)
                self._link.send(link_pb2.Envelope(), pack(self._state, step))
                self.steps.planned(self._state, step)
            elif decision.is_empty:
                if self._state.requests and not self._state.in_flight:
                    raise InvariantError(f"wedged with {len(self._state.requests)} live requests")
                return

    def _make_text(self) -> None:
        self._answers.make_text(lambda request: self._state.finish(request, FinishReason.STOP))

    def _fail(self, request_id: str, why: str, kind: type[ChairliftError] = RequestFailed) -> None:
        """Ends a request with all its siblings; does nothing if it has ended."""
        family = self._answers.family(request_id)
        for answer in family:
            if answer.request.state is not RequestState.FINISHED:
                self._state.finish(answer.request, FinishReason.ABORT)
        if family:
            self._answers.fail(request_id, kind(f"request {request_id}: {why}"))

    def _stop(self) -> None:
        for answer in self._answers:
            self._fail(answer.request.request_id, "the server stops", Unavailable)
        self._is_stopping = True

    def _set_status(self, **changes: object) -> None:
        self.status = replace(self.status, **changes)  # type: ignore[arg-type]
        self._on_status(self.status)

    def _update_status(self) -> None:
        running, waiting = count_by_state(self._state)
        if (running, waiting) != (self.status.num_running, self.status.num_waiting):
            self.status = replace(self.status, num_running=running, num_waiting=waiting)
