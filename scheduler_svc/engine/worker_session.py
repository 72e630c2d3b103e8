"""The engine's sessions with workers: who is there, and what comes of what they say.

One worker serves; others may be loading meanwhile. Hello is answered by the Configure. The worker
whose Hello came last takes over at its Ready, and the one before is dismissed: it stands by, and
offers itself again (`Hello.is_standby`), which counts only while nobody else is there. So two
workers never take the requests from each other in turns, and one that comes and goes costs nothing.

Whatever a worker sends, withholds or repeats ends its own session at most; the requests then wait
for the next Ready. Everything runs in the engine's thread.

Owns: the status that is told of worker and model. Does not own: the socket (worker_link.py), what
is planned (engine.py), or what clients are told (answers.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from protos import link_pb2
from protos.plan import StepPlan, StepResult
from scheduler_svc.core.limits import why_never_fits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import InFlight
from scheduler_svc.engine.answers import Answers
from scheduler_svc.engine.events import ModelFacts, Status
from scheduler_svc.engine.ready_check import geometry_of, why_not_ready
from scheduler_svc.engine.step_feed import StepFeed
from scheduler_svc.engine.step_watchdog import UNHURRIED, StepWatchdog
from scheduler_svc.engine.worker_link import Link, WorkerMessage
from scheduler_svc.errors import ChairliftError, RequestFailed, Unavailable

logger = logging.getLogger(__name__)

# How many failures in a row, of steps that computed it alone, fail a request. A worker dies of many
# things, and one that is replaced may not have died at all. Nonsense that a worker sends is hardly
# ever a request's fault; but if only one request brings it about, that must not go on for ever.
TRIES_IF_FAULTY: Final = 2
TRIES_IF_LOST: Final = 3
TRIES_IF_REPLACED: Final = 5
TRIES_IF_NONSENSE: Final = 16
NOT_A_STEP: Final = 0  # nobody is to blame
MAX_ERROR: Final = 2000  # characters that are passed on of a worker's error
MAX_LOADING: Final = 8  # workers that load at the same time
# Sessions may end one after the other, without a result between them, this often at once; then
# the next Configure waits, each time twice as long.
FREE_TRIES: Final = 4
LONGEST_PAUSE: Final = 8.0  # seconds


class Fail(Protocol):
    """Ends a request with all its siblings; does nothing if it has ended."""

    def __call__(
        self, request_id: str, why: str, kind: type[ChairliftError] = RequestFailed
    ) -> None: ...


@dataclass(slots=True, eq=False)
class Worker:
    """A worker that was sent the Configure."""

    boot_id: int
    name: str
    number: int  # of its Hello: the greatest is the newest
    heard: float  # when it last said anything, by the engine's clock
    watchdog: StepWatchdog
    beat: link_pb2.Heartbeat = field(default_factory=link_pb2.Heartbeat)


class WorkerSession:
    """See the module's docstring. `make_text` and `fail` are the engine's."""

    def __init__(
        self,
        scheduler: Scheduler,
        answers: Answers,
        steps: StepFeed,
        link: Link,
        configure: link_pb2.Configure,
        make_text: Callable[[], None],
        fail: Fail,
        on_status: Callable[[Status], None],
        heartbeat_timeout: float,
        step_timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self.status = Status("connecting", None, None, 0, 0)
        self._scheduler = scheduler
        self._state = scheduler.state
        self._answers = answers
        self._steps = steps
        self._link = link
        self._configure = configure
        self._make_text = make_text
        self._fail = fail
        self._on_status = on_status
        self._heartbeat_timeout = heartbeat_timeout
        self._step_timeout = step_timeout
        self._clock = clock
        self._serving: Worker | None = None
        self._loading: dict[int, Worker] = {}  # by boot_id, the oldest first
        self._vocab_size = 0  # of the worker that serves
        self._num_hellos = 0
        self._num_lost = 0  # sessions that ended since the last result
        self._next_hello_at = 0.0

    def send(self, message: link_pb2.Envelope, plan: StepPlan | None = None) -> None:
        """To the worker that serves."""
        if self._serving is not None:
            message.worker_boot_id = self._serving.boot_id
            self._link.send(message, plan)

    def look_after(self) -> None:
        """Ends the sessions of workers that are silent, or stand still, for too long."""
        now = self._clock()
        for worker in self._everyone():
            if now - worker.heard > self._heartbeat_timeout:
                self._lose(worker, f"nothing heard of it for {now - worker.heard:.1f} s")
        if self._serving is not None:
            why = self._serving.watchdog.look(self._oldest_step(), now)
            if why is not None:
                self._lose(self._serving, why, TRIES_IF_FAULTY)

    def on_message(self, message: WorkerMessage) -> None:
        envelope = message.envelope
        kind = envelope.WhichOneof("message")
        if kind == "hello" and message.error is None:
            self._on_hello(envelope.worker_boot_id, envelope.hello)
            return
        worker = self._worker(envelope.worker_boot_id)
        if worker is None:
            return  # late: its session has ended
        worker.heard = self._clock()
        if message.error is not None:
            self._lose(
                worker, message.error, TRIES_IF_NONSENSE if message.is_alive else TRIES_IF_LOST
            )
        elif kind == "heartbeat":
            self._on_heartbeat(worker, envelope.heartbeat)
        elif kind == "bye":
            why = f"it says goodbye: {envelope.bye.reason or 'no reason given'}"
            self._lose(worker, why, TRIES_IF_LOST if envelope.bye.is_failure else NOT_A_STEP)
        elif worker is not self._serving:
            self._on_newcomer(worker, envelope)
        elif message.result is not None:
            self._on_result(message.result)
        elif kind == "fault" and not envelope.fault.is_fatal:
            self._on_fault(envelope.fault)
        else:
            self._lose_over_nonsense(f"it says {kind} while it serves")

    def _on_hello(self, boot_id: int, hello: link_pb2.Hello) -> None:
        now = self._clock()
        known = self._worker(boot_id)
        if known is not None:
            self._forget(known, "it says Hello anew", TRIES_IF_REPLACED)
        if hello.is_standby and self._everyone():
            self._link.drop(boot_id)
            return
        if now < self._next_hello_at or len(self._loading) >= MAX_LOADING:
            self._link.drop(boot_id, "too many workers come and go; try again later")
            return
        self._num_hellos += 1
        name = f"{hello.host[:100]}, pid {hello.pid}"
        logger.info("worker on %s (version %s) connects", name, hello.version[:100])
        watchdog = StepWatchdog(self._step_timeout)
        self._loading[boot_id] = Worker(boot_id, name, self._num_hellos, now, watchdog)
        self._link.send(link_pb2.Envelope(worker_boot_id=boot_id, configure=self._configure))
        self._set_worker_status(fatal_error=None)

    def _on_heartbeat(self, worker: Worker, heartbeat: link_pb2.Heartbeat) -> None:
        worker.beat = heartbeat
        if worker is self._serving:
            why = worker.watchdog.beat(heartbeat, self._oldest_step(), self._clock())
            if why is not None:
                self._lose_over_nonsense(why)

    def _on_newcomer(self, worker: Worker, envelope: link_pb2.Envelope) -> None:
        """What a worker that loads says."""
        kind = envelope.WhichOneof("message")
        if kind == "ready":
            why = why_not_ready(
                envelope.ready, self._configure, self._state.limits.max_requests_per_batch
            )
            if why is not None:
                self._lose(worker, f"its Ready makes no sense: {why}")
            elif self._serving is not None and self._serving.number > worker.number:
                self._dismiss(worker, self._serving)
            else:
                self._take_over(worker, envelope.ready)
        elif kind != "fault":
            self._lose(worker, f"it says {kind} before it is ready")
        elif not envelope.fault.is_fatal or len(self._everyone()) > 1:
            self._lose(worker, f"it fails: {envelope.fault.error[:MAX_ERROR]}")
        else:
            self._give_up(worker, envelope.fault.error[:MAX_ERROR])

    def _take_over(self, worker: Worker, ready: link_pb2.Ready) -> None:
        del self._loading[worker.boot_id]
        if self._serving is not None:
            self._dismiss(self._serving, worker)
        self._serving = worker
        self._on_ready(ready)

    def _dismiss(self, worker: Worker, successor: Worker) -> None:
        """The worker stays at hand, in case its successor goes away."""
        self._forget(worker, f"the worker on {successor.name} takes over", TRIES_IF_REPLACED)
        self._link.drop(worker.boot_id, f"the worker on {successor.name} took over")

    def _give_up(self, worker: Worker, error: str) -> None:
        """Nobody can serve the model: nobody needs to wait."""
        logger.error("the worker gives up: %s", error)
        del self._loading[worker.boot_id]
        self._link.drop(worker.boot_id)
        for answer in self._answers:
            self._fail(answer.request.request_id, error, Unavailable)
        self._set_worker_status(fatal_error=error)

    def _on_result(self, result: StepResult) -> None:
        in_flight = self._state.in_flight
        if result.step_id < self._state.next_step_id and (
            not in_flight or result.step_id < in_flight[0].step_id
        ):
            return  # late or said again: its plan was given up after a Fault, or is answered
        mismatch = self._scheduler.why_invalid(result, self._vocab_size)
        if mismatch is not None:
            self._lose_over_nonsense(f"it answers wrongly: {mismatch}")
            return
        self._num_lost = 0
        absorbed = self._scheduler.absorb(result)
        self._steps.returned(result.step_id, result.device_microseconds)
        self._answers.take_in(absorbed.sampled, absorbed.ended)
        for request in absorbed.not_finite:
            self._fail(request.request_id, "its hidden states are not finite numbers")

    def _on_ready(self, ready: link_pb2.Ready) -> None:
        geometry = geometry_of(ready)
        self._make_text()
        self._scheduler.lose_worker(geometry)
        is_reserved = self._state.holds_ended
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
            num_embeddings=ready.num_embeddings or ready.vocab_size,
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
        self._vocab_size = ready.vocab_size
        self._set_worker_status(model=model, fatal_error=None)

    def _on_fault(self, fault: link_pb2.Fault) -> None:
        in_flight = [step.step_id for step in self._state.in_flight]
        if fault.step_id not in in_flight:
            self._lose_over_nonsense(
                f"it reports a fault of step {fault.step_id}; in flight: {in_flight}"
            )
            return
        error = fault.error[:MAX_ERROR]
        logger.error("step %d failed in the worker: %s", fault.step_id, error)
        # the plan behind it was not begun
        failed = [step for step in self._state.in_flight if step.step_id == fault.step_id]
        self._make_text()
        # steps are counted on, so that a result of a step before the fault is known as late
        self._scheduler.lose_worker(self._state.geometry, self._state.next_step_id)
        self._blame(failed, f"the step that computes it fails: {error}", TRIES_IF_FAULTY)
        resume = link_pb2.Resume(next_step_id=self._state.next_step_id)
        self.send(link_pb2.Envelope(resume=resume))

    def _lose_over_nonsense(self, why: str) -> None:
        """Ends the session of the worker that serves: what it says contradicts what it was sent."""
        if self._serving is not None:
            self._lose(self._serving, why, TRIES_IF_NONSENSE)

    def _lose(self, worker: Worker, why: str, tries_alone: int = TRIES_IF_LOST) -> None:
        """Ends a session. The worker is told, and may offer itself again."""
        self._forget(worker, why, tries_alone)
        self._link.drop(worker.boot_id, why)
        self._num_lost += 1
        if self._num_lost > FREE_TRIES:
            pause = min(LONGEST_PAUSE, 0.5 * 2 ** (self._num_lost - FREE_TRIES - 1))
            self._next_hello_at = self._clock() + pause
        self._set_worker_status()

    def _forget(self, worker: Worker, why: str, tries_alone: int) -> None:
        """The requests of one that serves wait for the next one."""
        if worker is not self._serving:
            logger.warning("worker on %s gone before it served: %s", worker.name, why)
            self._loading.pop(worker.boot_id, None)
            return
        logger.warning(
            "worker lost: %s; %d requests wait for the next one", why, len(self._answers)
        )
        self._serving = None
        in_flight = list(self._state.in_flight)
        self._make_text()
        self._scheduler.lose_worker()
        if tries_alone != NOT_A_STEP:
            why = f"the worker is lost in the step that computes it: {why}"
            self._blame(in_flight, why, tries_alone)

    def _blame(self, failed: Sequence[InFlight], why: str, tries_alone: int) -> None:
        """One of these steps has failed: fails who is guilty of that, and says who may be."""
        suspects = self._state.suspects
        reached = [reach for step in failed for reach in step.reaches()]
        for request_id in suspects.blame(reached, tries_alone):
            logger.error("request %s fails: %s", request_id, why)
            self._fail(request_id, why)
        if suspects.is_active:
            logger.warning("suspected of a failed step: %s; they run apart", suspects)

    def _everyone(self) -> list[Worker]:
        loading = list(self._loading.values())
        return loading if self._serving is None else [self._serving, *loading]

    def _worker(self, boot_id: int) -> Worker | None:
        if self._serving is not None and self._serving.boot_id == boot_id:
            return self._serving
        return self._loading.get(boot_id)

    def _oldest_step(self) -> int | None:
        in_flight = self._state.in_flight
        return in_flight[0].step_id if in_flight else None

    def _busy(self) -> str:
        """What the worker is busy with, in words: of several that load, the one that came first."""
        for worker in self._everyone():
            beat = worker.beat
            if beat.busy in UNHURRIED:
                share = f" {beat.progress:.0%}" if 0 < beat.progress <= 1 else ""
                return f"{beat.busy}{share}"
            return f"step {beat.busy_step}" if beat.busy == "step" else "idle"
        return ""

    def count(self, num_running: int, num_waiting: int) -> None:
        """Brings the status up to date with the requests and the heartbeats; nobody is told."""
        busy, status = self._busy(), self.status
        if (num_running, num_waiting, busy) != (
            status.num_running,
            status.num_waiting,
            status.busy,
        ):
            self.status = replace(
                status, num_running=num_running, num_waiting=num_waiting, busy=busy
            )

    def _set_worker_status(self, **changes: object) -> None:
        """Tells of `changes`, and of who is there; nobody is told of what has not changed."""
        worker = "connecting" if self.status.fatal_error is None else "none"
        if changes.get("fatal_error") is not None:
            worker = "none"
        elif self._serving is not None:
            worker = "ready"
        elif self._loading:
            worker = "loading"
        status = replace(self.status, worker=worker, **changes)  # type: ignore[arg-type]
        if status != self.status:
            self.status = status
            self._on_status(status)
