"""The engine's sessions with workers: which worker serves, and how its messages are handled.

One worker serves; others may be loading meanwhile. A Hello is answered with the Configure. When a
worker is ready, it takes over if its Hello came later than that of the serving one, which is
dismissed: it stands by and offers itself again (`Hello.is_standby`), which only counts while there
is no other worker. So two workers never take the requests from each other in turns, and one that
comes and goes costs nothing.

Whatever a worker sends, withholds or repeats ends at most its own session; the requests are then
requeued for the next worker. Everything runs in the engine's thread.

Owns the status of worker and model. Does not own the socket (worker_link.py), planning (engine.py)
or the events for clients (answers.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

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
from scheduler_svc.engine.worker_link import WorkerLink, WorkerMessage
from scheduler_svc.errors import ChairliftError, RequestFailed, Unavailable

logger = logging.getLogger(__name__)

# A request fails after this many consecutive failed steps that computed it alone. Workers die for
# many reasons, and a replaced one may not have died at all. Invalid messages are hardly ever a
# request's fault; but a single request that causes them must not do so forever.
TRIES_IF_FAULTY: Final = 2
TRIES_IF_LOST: Final = 3
TRIES_IF_REPLACED: Final = 5
TRIES_IF_INVALID: Final = 16
NOT_A_STEP: Final = 0  # no request is to blame
MAX_ERROR: Final = 2000  # characters of a worker's error that are passed on
MAX_LOADING: Final = 8  # workers that load at the same time
# After this many sessions lost without a result in between, the next Configure is delayed, each
# time twice as long.
FREE_TRIES: Final = 4
LONGEST_PAUSE: Final = 8.0  # seconds


@dataclass(slots=True, eq=False)
class Worker:
    """A worker that has been sent the Configure."""

    boot_id: int
    name: str
    number: int  # of its Hello; the highest is the newest
    heard: float  # time of its last message, by the engine's clock
    watchdog: StepWatchdog
    beat: link_pb2.Heartbeat = field(default_factory=link_pb2.Heartbeat)


class WorkerSession:
    """See the module's docstring. `make_text` and `fail` (a request with all its siblings, with
    a reason and an error class) are the engine's."""

    def __init__(
        self,
        scheduler: Scheduler,
        answers: Answers,
        steps: StepFeed,
        link: WorkerLink,
        configure: link_pb2.Configure,
        make_text: Callable[[], None],
        fail: Callable[[str, str, type[ChairliftError]], None],
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
        """Sends to the serving worker, if there is one."""
        if self._serving is not None:
            message.worker_boot_id = self._serving.boot_id
            self._link.send(message, plan)

    def sender(self) -> Callable[[link_pb2.Envelope], None]:
        """Sends to the worker that serves now, and to none after it; for any thread."""
        boot_id = 0 if self._serving is None else self._serving.boot_id

        def send(message: link_pb2.Envelope) -> None:
            message.worker_boot_id = boot_id
            self._link.send(message)

        return send

    def check_timeouts(self) -> None:
        """Ends the sessions of workers that have been silent, or stuck in a step, for too long."""
        now = self._clock()
        for worker in self._workers():
            if now - worker.heard > self._heartbeat_timeout:
                self._lose(worker, f"no message for {now - worker.heard:.1f} s")
        if self._serving is not None:
            why = self._serving.watchdog.check(self._oldest_step(), now)
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
            return  # its session has ended
        worker.heard = self._clock()
        if message.error is not None:
            tries = TRIES_IF_INVALID if message.is_alive else TRIES_IF_LOST
            self._lose(worker, message.error, tries)
            return
        match kind:
            case "heartbeat":
                self._on_heartbeat(worker, envelope.heartbeat)
            case "bye":
                why = f"it disconnected: {envelope.bye.reason or 'no reason given'}"
                self._lose(worker, why, TRIES_IF_LOST if envelope.bye.is_failure else NOT_A_STEP)
            case _ if worker is not self._serving:
                self._on_loading(worker, envelope)
            case "step_result" if message.result is not None:
                self._on_result(message.result)
            case "fault" if not envelope.fault.is_fatal:
                self._on_fault(envelope.fault)
            case _:
                self._lose_as_invalid(f"it sent {kind} while serving")

    def _on_hello(self, boot_id: int, hello: link_pb2.Hello) -> None:
        now = self._clock()
        known = self._worker(boot_id)
        if known is not None:
            self._forget(known, "it sent another Hello", TRIES_IF_REPLACED)
        if hello.is_standby and self._workers():
            self._link.drop(boot_id)
            return
        if now < self._next_hello_at or len(self._loading) >= MAX_LOADING:
            self._link.drop(boot_id, "too many workers connect and disconnect; try again later")
            return
        self._num_hellos += 1
        name = f"{hello.host[:100]}, pid {hello.pid}"
        logger.info("worker on %s (version %s) connected", name, hello.version[:100])
        watchdog = StepWatchdog(self._step_timeout)
        self._loading[boot_id] = Worker(boot_id, name, self._num_hellos, now, watchdog)
        self._link.send(link_pb2.Envelope(worker_boot_id=boot_id, configure=self._configure))
        self._set_worker_status(fatal_error=None)

    def _on_heartbeat(self, worker: Worker, heartbeat: link_pb2.Heartbeat) -> None:
        worker.beat = heartbeat
        if worker is self._serving:
            why = worker.watchdog.on_heartbeat(heartbeat, self._oldest_step(), self._clock())
            if why is not None:
                self._lose_as_invalid(why)

    def _on_loading(self, worker: Worker, envelope: link_pb2.Envelope) -> None:
        """Handles a message of a worker that is loading."""
        kind = envelope.WhichOneof("message")
        if kind == "ready":
            why = why_not_ready(
                envelope.ready, self._configure, self._state.limits.max_requests_per_batch
            )
            if why is not None:
                self._lose(worker, f"it sent an invalid Ready: {why}")
            elif self._serving is not None and self._serving.number > worker.number:
                self._dismiss(worker, self._serving)
            else:
                self._take_over(worker, envelope.ready)
        elif kind != "fault":
            self._lose(worker, f"it sent {kind} before it was ready")
        elif not envelope.fault.is_fatal or len(self._workers()) > 1:
            self._lose(worker, f"it failed: {envelope.fault.error[:MAX_ERROR]}")
        else:
            self._give_up(worker, envelope.fault.error[:MAX_ERROR])

    def _take_over(self, worker: Worker, ready: link_pb2.Ready) -> None:
        del self._loading[worker.boot_id]
        if self._serving is not None:
            self._dismiss(self._serving, worker)
        self._serving = worker
        self._on_ready(ready)

    def _dismiss(self, worker: Worker, successor: Worker) -> None:
        """The worker stands by, in case its successor goes away."""
        self._forget(worker, f"the worker on {successor.name} takes over", TRIES_IF_REPLACED)
        self._link.drop(worker.boot_id, f"the worker on {successor.name} took over")

    def _give_up(self, worker: Worker, error: str) -> None:
        """No worker can serve the model, so no request needs to wait."""
        logger.error("the worker reported a fatal error: %s", error)
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
            return  # late or repeated: its plan was discarded after a Fault, or has a result
        mismatch = self._scheduler.why_invalid(result, self._vocab_size)
        if mismatch is not None:
            self._lose_as_invalid(f"it sent an invalid result: {mismatch}")
            return
        self._num_lost = 0
        absorbed = self._scheduler.absorb(result)
        self._steps.returned(result.step_id, result.device_microseconds)
        self._answers.note_sampled(absorbed.sampled, absorbed.ended)
        for request in absorbed.not_finite:
            why = "its hidden states are not finite numbers"
            self._fail(request.request_id, why, RequestFailed)

    def _on_ready(self, ready: link_pb2.Ready) -> None:
        geometry = geometry_of(ready)
        pool_tokens = geometry.pool_tokens(self._state.holds_ended)
        self._make_text()
        self._scheduler.lose_worker(geometry)
        for answer in self._answers:
            request = answer.request
            num_prompt, group = request.num_prompt_tokens, request.beams
            holds, width = pool_tokens, 1
            if group is not None:
                width = len(group.members)
                holds = geometry.pool_tokens(False, width, num_prompt)
            max_tokens = request.max_total_tokens - num_prompt
            reason = why_never_fits(num_prompt, max_tokens, ready.max_model_len, holds, width)
            if reason is not None:
                why = f"it does not fit the worker's memory: {reason}"
                self._fail(request.request_id, why, RequestFailed)
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
            geometry=geometry,
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
            self._lose_as_invalid(
                f"it reported a fault of step {fault.step_id}; in flight: {in_flight}"
            )
            return
        error = fault.error[:MAX_ERROR]
        logger.error("step %d failed in the worker: %s", fault.step_id, error)
        # the plan after it was not started
        failed = [step for step in self._state.in_flight if step.step_id == fault.step_id]
        self._make_text()
        # step ids continue, so that the result of a step before the fault is recognised as late
        self._scheduler.lose_worker(self._state.geometry, self._state.next_step_id)
        self._blame(failed, f"the step that computed it failed: {error}", TRIES_IF_FAULTY)
        resume = link_pb2.Resume(next_step_id=self._state.next_step_id)
        self.send(link_pb2.Envelope(resume=resume))

    def _lose_as_invalid(self, why: str) -> None:
        """Ends the serving worker's session: its message contradicts what it was sent."""
        if self._serving is not None:
            self._lose(self._serving, why, TRIES_IF_INVALID)

    def _lose(self, worker: Worker, why: str, tries_alone: int = TRIES_IF_LOST) -> None:
        """Ends a session. The worker gets the reason, and may connect again."""
        self._forget(worker, why, tries_alone)
        self._link.drop(worker.boot_id, why)
        self._num_lost += 1
        if self._num_lost > FREE_TRIES:
            pause = min(LONGEST_PAUSE, 0.5 * 2 ** (self._num_lost - FREE_TRIES - 1))
            self._next_hello_at = self._clock() + pause
        self._set_worker_status()

    def _forget(self, worker: Worker, why: str, tries_alone: int) -> None:
        """Requests of the serving worker are requeued for the next one."""
        if worker is not self._serving:
            logger.warning("worker on %s lost before it was ready: %s", worker.name, why)
            self._loading.pop(worker.boot_id, None)
            return
        logger.warning(
            "worker lost: %s; %d requests requeued for the next worker", why, len(self._answers)
        )
        self._serving = None
        in_flight = list(self._state.in_flight)
        self._make_text()
        self._scheduler.lose_worker()
        if tries_alone != NOT_A_STEP:
            why = f"the worker was lost in the step that computed it: {why}"
            self._blame(in_flight, why, tries_alone)

    def _blame(self, failed: Sequence[InFlight], why: str, tries_alone: int) -> None:
        """One of these steps failed: fails the requests found guilty, and logs the suspects."""
        suspects = self._state.suspects
        reached = [reach for step in failed for reach in step.reaches()]
        for request_id in suspects.blame(reached, tries_alone):
            logger.error("request %s failed: %s", request_id, why)
            self._fail(request_id, why, RequestFailed)
        if suspects.is_active:
            logger.warning("suspected of a failed step, and run apart from now on: %s", suspects)

    def _workers(self) -> list[Worker]:
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
        """Describes what the worker is doing; while several load, what the oldest of them is."""
        for worker in self._workers():
            beat = worker.beat
            if beat.busy in UNHURRIED:
                share = f" {beat.progress:.0%}" if 0 < beat.progress <= 1 else ""
                return f"{beat.busy}{share}"
            return f"step {beat.busy_step}" if beat.busy == "step" else "idle"
        return ""

    def count(self, num_running: int, num_waiting: int) -> None:
        """Updates the status by the number of requests and the heartbeats, without `on_status`."""
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
        """Updates the status by `changes` and the workers there are; reports it if it differs."""
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
