"""The engine: one thread owns the scheduler's state; everybody else posts commands to it.

    commands, worker messages → absorb → decide → commit → pack → send → text → events

Text is made after the next plan has been sent, so that the worker does not wait for it. A stop
string is therefore found when the next step may already compute the row; what that step samples
is dropped, as after an EOS under run-ahead.

Owns: the state and the order of these things. Does not own: what a worker's messages mean
(worker_session.py), what is told to clients (answers.py), sockets (worker_link.py), streams and
statuses (streams.py, statuses.py).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

from protos import link_pb2
from scheduler_svc.core.check import check_idle
from scheduler_svc.core.limits import Limits, why_never_fits
from scheduler_svc.core.policies import FIFO, Policy
from scheduler_svc.core.request import FinishReason, RequestState
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import State
from scheduler_svc.core.wedge import describe, loosen, stuck
from scheduler_svc.engine.answers import Answers
from scheduler_svc.engine.events import Event, Status, Submission, TextStream
from scheduler_svc.engine.step_feed import StepFeed
from scheduler_svc.engine.views import count_by_state
from scheduler_svc.engine.worker_link import Link, WorkerMessage
from scheduler_svc.engine.worker_session import WorkerSession
from scheduler_svc.errors import (
    ChairliftError,
    DuplicateRequest,
    QueueFull,
    RequestFailed,
    RequestRejected,
    Unavailable,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
Command = Callable[[], None]

TICK_SECONDS: Final = 0.25  # how often a silent worker is looked at
QUESTION_SECONDS: Final = 0.001  # of a turn that are for questions
BEHIND_SECONDS: Final = 0.01  # how soon to go on with deltas that could not be told of at once


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
        step_timeout: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deliver` gets the events of a step, `on_status` a changed Status, both in the
        engine's thread; neither may block. `max_queue_size` bounds the requests that wait and that
        no row is free for; 0 = no bound.
        Timeouts are in seconds; a `step_timeout` of 0 lets steps take for ever.
        """
        self.steps = StepFeed(clock)
        self._link = link
        self._deliver = deliver
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
            on_status,
            heartbeat_timeout,
            step_timeout,
            clock,
        )
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._questions: deque[Command] = deque()  # may take long, and can wait
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._is_checked = True  # since the last change

    # From any thread

    @property
    def status(self) -> Status:
        return self._session.status

    def start(self, on_crash: Callable[[BaseException], None] | None = None) -> None:
        """Binds the link and starts the thread; `on_crash` is told of a broken invariant."""
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
        """Takes a request; what becomes of it comes as events."""
        self._inbox.put(lambda: self.on_submit(submission))

    def abort(self, request_ids: Sequence[str]) -> Future[list[str]]:
        """Ends those of the requests that are live, and says which they were."""
        return self._call(lambda: self.on_abort(request_ids))

    def ask(self, question: Callable[[State], T]) -> Future[T]:
        """Reads the state in the engine's thread, between two steps."""
        return self._call(lambda: question(self._state), is_question=True)

    def flush_cache(self) -> Future[int]:
        """Empties the prefix cache; how many blocks lost their content's name."""
        return self._call(self.on_flush_cache, is_question=True)

    def _call(self, function: Callable[[], T], is_question: bool = False) -> Future[T]:
        answer: Future[T] = Future()

        def command() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function())
            except Exception as error:  # the asker's, not the engine's
                answer.set_exception(error)

        self._inbox.put((lambda: self._questions.append(command)) if is_question else command)
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
        """Waits for a command, obeys all that are there, plans, makes text, delivers.

        What comes meanwhile has to wait, and most questions too if they take long: else those who
        ask all the time would have the thread for themselves.
        """
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
        self._answer_questions()
        self._session.look_after()
        self._plan()
        self._make_text()
        events = self._answers.take_events()
        if events:
            self._deliver(events)
        self._session.count(*count_by_state(self._state))
        if not self._state.requests and not self._state.in_flight and not self._is_checked:
            check_idle(self._state)
            self._is_checked = True

    def _answer_questions(self) -> None:
        """At least one, if there are any."""
        began = self._clock()
        while self._questions:
            self._questions.popleft()()
            if self._clock() - began > QUESTION_SECONDS:
                return

    def on_submit(self, submission: Submission) -> None:
        new = submission.new
        try:
            self._check_new(submission)
        except ChairliftError as error:
            self._answers.refuse(new.request_id, error)
            return
        family = self._scheduler.submit(new)
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
        most = self._max_queue_size
        # who came with this turn's commands has no row yet, but may get one with the next plan
        if most and len(self._state.pending) >= most and self._state.num_queued() >= most:
            raise QueueFull(self._state.num_queued(), most)
        if new.n > 1 and self._state.holds_ended:
            raise RequestRejected("sampling.n", new.n, "1, when scheduler_type is static")
        if self.status.is_ready:
            state = self._state
            reason = why_never_fits(
                state.geometry,
                len(new.prompt_token_ids),
                new.max_tokens,
                state.holds_ended,
            )
            if reason is not None:
                raise RequestRejected("max_tokens", new.max_tokens, f"fewer: {reason}")

    def on_abort(self, request_ids: Sequence[str]) -> list[str]:
        self._make_text()  # else one that has just ended would end without its last tokens
        aborted = [request_id for request_id in request_ids if request_id in self._answers]
        for request_id in dict.fromkeys(aborted):
            for answer in self._answers.family(request_id):
                if answer.request.state is not RequestState.FINISHED:
                    self._scheduler.finish(answer.request, FinishReason.ABORT)
                self._answers.end(answer)
        return aborted

    def on_flush_cache(self) -> int:
        self._is_checked = False
        return self._scheduler.flush_cache()

    def on_worker(self, message: WorkerMessage) -> None:
        self._session.on_message(message)

    def _on_dead_link(self, error: BaseException) -> None:
        raise RuntimeError(f"the thread of the worker link died: {error}") from error

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
                self.steps.planned(self._state, step)
            elif self._state.requests and not self._state.in_flight:
                self._loosen()
            else:
                return

    def _loosen(self) -> None:
        """Nobody can go on, a bug of ours: it costs a request its memory, and then its life."""
        request = stuck(self._state)
        facts = describe(self._state, request)
        is_loosened = loosen(self._state, request)
        logger.error(
            "wedged: %d requests live and no step can be planned, a bug in Chairlift: please "
            "report it with this line. One request %s; %s",
            len(self._state.requests),
            "starts afresh" if is_loosened else "fails",
            facts,
        )
        self._is_checked = False
        if not is_loosened:
            why = (
                "no step can be planned for it: a bug in Chairlift, which the scheduler's log tells"
            )
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
            self._fail(answer.request.request_id, "the server stops", Unavailable)
        self._is_stopping = True
