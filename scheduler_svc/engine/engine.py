"""The engine: one thread owns the scheduler's state; other threads post commands to it.

    commands, worker messages → absorb → plan → send → text → events

Text is made after the next plan has been sent, so that the worker does not wait for it. A stop
string is therefore found when the next step may already be computing the row; what that step
samples is dropped, as after an EOS under run-ahead.

Owns the state and the loop over it. Does not own the worker protocol (worker_session.py), pacing of
text (answers.py), sockets (worker_link.py), or streams and statuses (front/).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from protos import link_pb2
from scheduler_svc.core.check import check_idle
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.policies import FIFO, Policy
from scheduler_svc.core.request import FinishReason, RequestState
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import State
from scheduler_svc.core.wedge import describe, loosen, stuck
from scheduler_svc.engine.answers import Answers
from scheduler_svc.engine.cache_feed import CacheFeed
from scheduler_svc.engine.events import Event, Status, Submission, check_fits
from scheduler_svc.engine.masks import Masks
from scheduler_svc.engine.step_feed import StepFeed
from scheduler_svc.engine.views import count_by_state
from scheduler_svc.engine.worker_link import WorkerLink, WorkerMessage
from scheduler_svc.engine.worker_session import WorkerSession
from scheduler_svc.errors import (
    ChairliftError,
    ConstraintFailed,
    DuplicateRequest,
    QueueFull,
    RequestFailed,
    RequestRejected,
    Unavailable,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
Command = Callable[[], None]

TICK_SECONDS: Final = 0.25  # longest wait of a turn: how often timeouts of workers are checked
QUESTION_SECONDS: Final = 0.001  # share of a turn for questions
BEHIND_SECONDS: Final = 0.01  # longest wait of a turn while deltas exceed the rate


class Engine:
    """Serves requests through whichever worker is ready; see the module's docstring."""

    def __init__(
        self,
        limits: Limits,
        configure: link_pb2.Configure,
        link: WorkerLink,
        *,
        policy: Policy = FIFO,
        max_queue_size: int = 0,
        heartbeat_timeout: float = 10.0,
        step_timeout: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_queue_size` bounds the waiting requests that no row is free for; 0 = no bound.
        Timeouts are in seconds; a `step_timeout` of 0 never expires.
        """
        self.steps = StepFeed(clock)
        self.cache_feed = CacheFeed()
        self._link = link
        self._deliver: Callable[[list[Event]], None] = lambda events: None
        self._on_status: Callable[[Status], None] = lambda status: None
        self._clock = clock
        self._max_queue_size = max_queue_size
        self._scheduler = Scheduler(limits, policy=policy)
        self._state = self._scheduler.state
        self._answers = Answers(clock)
        self._session = WorkerSession(
            self._scheduler,
            self._answers,
            self.steps,
            link,
            configure,
            self._make_text,
            self._fail,
            lambda status: self._on_status(status),
            heartbeat_timeout,
            step_timeout,
            clock,
        )
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._masks = Masks(
            self._state,
            lambda request, why: self._fail(request.request_id, why, ConstraintFailed),
            self._inbox.put,
            clock,
        )
        self._questions: deque[Command] = deque()  # may take long, and are not urgent
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._is_checked = True  # `check_idle` has run since the last change

    # From any thread

    @property
    def status(self) -> Status:
        return self._session.status

    def attach(
        self, deliver: Callable[[list[Event]], None], on_status: Callable[[Status], None]
    ) -> None:
        """Before `start`: `deliver` gets the events of each turn, `on_status` every change of the
        status but its counts. Both are called in the engine's thread and must not block."""
        self._deliver, self._on_status = deliver, on_status

    def start(self, on_crash: Callable[[BaseException], None] | None = None) -> None:
        """Binds the link and starts the thread; `on_crash` gets the error that ends it."""
        self._link.start(
            lambda message: self._inbox.put(lambda: self.on_worker(message)),
            lambda error: self._inbox.put(lambda: self._on_dead_link(error)),
        )
        self._thread = threading.Thread(target=self._run, args=(on_crash,), name="engine")
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and the link; live requests fail as UNAVAILABLE."""
        self._inbox.put(self._stop)
        if self._thread is not None:
            self._thread.join()
        self._link.stop()

    def submit(self, submission: Submission) -> None:
        """Accepts or refuses a request; the outcome arrives as events."""
        self._inbox.put(lambda: self.on_submit(submission))

    def abort(self, request_ids: Sequence[str]) -> Future[list[str]]:
        """Ends the requests that are live; the result lists them."""
        return self._call(lambda: self.on_abort(request_ids))

    def ask(self, question: Callable[[State], T]) -> Future[T]:
        """Reads the state in the engine's thread, between two steps."""
        return self._call(lambda: question(self._state), is_question=True)

    def flush_cache(self) -> Future[int]:
        """Empties the prefix cache; the result is the number of blocks dropped from it."""
        return self._call(self.on_flush_cache, is_question=True)

    def _call(self, function: Callable[[], T], is_question: bool = False) -> Future[T]:
        answer: Future[T] = Future()

        def command() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function())
            except Exception as error:  # the caller's error, not the engine's
                answer.set_exception(error)

        self._inbox.put((lambda: self._questions.append(command)) if is_question else command)
        return answer

    # In the engine's thread

    def _run(self, on_crash: Callable[[BaseException], None] | None) -> None:
        try:
            while not self._is_stopping:
                self.turn(TICK_SECONDS)
        except BaseException as error:
            logger.critical("engine crashed: %s: %s", type(error).__name__, error, exc_info=True)
            if on_crash is None:
                raise
            on_crash(error)

    def turn(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for a command, then does everything that is due."""
        self._run_commands(timeout)
        self._masks.advance()
        self._answer_questions()
        self._session.check_timeouts()
        self._plan()
        self._make_text()
        self._deliver_events()
        self.cache_feed.forward(self._state)
        self._session.count(*count_by_state(self._state))
        self._check_if_idle()

    def _run_commands(self, timeout: float) -> None:
        """Runs the commands that are there; later ones wait for the next turn, so that nobody who
        submits or asks without pause can stop the planning."""
        if self._answers.is_behind:
            timeout = min(timeout, BEHIND_SECONDS)
        if self._questions:
            timeout = 0.0
        try:
            self._inbox.get(timeout=timeout)()
            for _ in range(self._inbox.qsize()):
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _answer_questions(self) -> None:
        """One question, and more while they are quick."""
        began = self._clock()
        while self._questions:
            self._questions.popleft()()
            if self._clock() - began > QUESTION_SECONDS:
                return

    def _deliver_events(self) -> None:
        if events := self._answers.take_events():
            self._deliver(events)

    def _check_if_idle(self) -> None:
        """Crashes if an idle engine still holds memory; once after every change."""
        if not self._is_checked and not self._state.requests and not self._state.in_flight:
            check_idle(self._state)
            self._is_checked = True

    def on_submit(self, submission: Submission) -> None:
        new = submission.new
        try:
            self._check_new(submission)
        except ChairliftError as error:
            self._answers.refuse(new.request_id, error)
            return
        family = self._scheduler.submit(new)
        if submission.matcher is not None:
            self._masks.add(new.request_id, submission.matcher)
        texts: Sequence[Any] = submission.texts or [None] * len(family)
        for request, text in zip(family, texts, strict=True):
            self._answers.add(request, text, submission.is_streamed, submission.unsent_text)
        self._is_checked = False

    def _check_new(self, submission: Submission) -> None:
        new = submission.new
        if new.request_id in self._answers:
            raise DuplicateRequest(new.request_id)
        if self.status.fatal_error is not None:
            raise Unavailable(f"no worker can serve the model: {self.status.fatal_error}")
        limit = self._max_queue_size
        # requests of this turn's commands have no row yet, but may get one with the next plan
        if limit and len(self._state.pending) >= limit and self._state.num_queued() >= limit:
            raise QueueFull(self._state.num_queued(), limit)
        if new.n > 1 and self._state.holds_ended:
            raise RequestRejected("sampling.n", new.n, "1, when scheduler_type is static")
        if new.beams is not None and self._state.holds_ended:
            allowed = "1, when scheduler_type is static"
            raise RequestRejected("sampling.beam_width", new.num_beams, allowed)
        if self.status.is_ready and self.status.model is not None:
            facts, num_prompt = self.status.model, len(new.prompt_token_ids)
            check_fits(num_prompt, new.max_tokens, facts, new.num_beams)

    def on_abort(self, request_ids: Sequence[str]) -> list[str]:
        self._make_text()  # else a request that has just ended would lose its last tokens
        aborted = [request_id for request_id in request_ids if request_id in self._answers]
        for request_id in dict.fromkeys(aborted):
            for answer in self._answers.family(request_id):
                if answer.request.state is not RequestState.FINISHED:
                    self._scheduler.finish(answer.request, FinishReason.ABORT)
                self._answers.finish(answer)
        return aborted

    def on_flush_cache(self) -> int:
        self._is_checked = False
        return self._scheduler.flush_cache()

    def on_worker(self, message: WorkerMessage) -> None:
        self._session.on_message(message)

    def _on_dead_link(self, error: BaseException) -> None:
        raise RuntimeError(f"the worker link's thread died: {error}") from error

    def _plan(self) -> None:
        if not self.status.is_ready:
            return
        while True:
            plan = self._scheduler.plan()
            if plan is not None:
                self._is_checked = False
                step = self._state.in_flight[-1]
                for request in step.admitted:
                    self._answers.note_scheduled(request)
                self._session.send(link_pb2.Envelope(), plan)
                if plan.awaits_mask:
                    self._masks.begin(step, self._session.sender())
                self.steps.planned(self._state, step)
            elif self._state.requests and not self._state.in_flight:
                self._loosen()
            else:
                return

    def _loosen(self) -> None:
        """Breaks a deadlock, a bug of ours: one request loses its memory, at the next its life."""
        request = stuck(self._state)
        facts = describe(self._state, request)
        is_loosened = loosen(self._state, request)
        logger.error(
            "deadlock: %d live requests, nothing schedulable; a bug in Chairlift, please report "
            "it with this line. One request %s; %s",
            len(self._state.requests),
            "is restarted" if is_loosened else "fails",
            facts,
        )
        self._is_checked = False
        if not is_loosened:
            why = "it cannot be scheduled: an internal error in Chairlift; see the scheduler's log"
            self._fail(request.request_id, why)

    def _make_text(self) -> None:
        self._answers.make_text(lambda request: self._scheduler.finish(request, FinishReason.STOP))

    def _fail(self, request_id: str, why: str, kind: type[ChairliftError] = RequestFailed) -> None:
        """Ends a request with all its siblings; does nothing if it has ended."""
        family = self._answers.family(request_id)
        for answer in family:
            if answer.request.state is not RequestState.FINISHED:
                self._scheduler.finish(answer.request, FinishReason.ABORT)
        if family:
            self._answers.fail(request_id, kind(f"request {request_id}: {why}"))

    def _stop(self) -> None:
        for answer in self._answers:
            self._fail(answer.request.request_id, "the server is stopping", Unavailable)
        self._masks.close()
        self._is_stopping = True
