"""What the worker does all day: takes a Configure, builds a runner, runs plan after plan.

A step that raises is reported as a Fault, and plans are discarded until the scheduler says Resume.
A model that cannot be loaded is the end: the scheduler is told, and the process exits. A new
session with the same Configure keeps the runner: the weights are the same, and what its KV pool
holds is never read, for the new scheduler knows of no block in it.

Owns: the order of these things. Does not own: the socket (link.py), what a step computes
(worker/runner.py), or waiting for it (completion.py).
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

from protos import link_pb2
from protos.plan import StepPlan
from worker.process import systemd
from worker.process.completion import Completion, LaunchedStep
from worker.process.device_failure import DeviceFailed
from worker.process.link import PlanRefused, SchedulerLink, Session, SessionEnded
from worker.process.progress import Progress
from worker.process.watchdog import Watchdog

logger = logging.getLogger(__name__)

EXIT_CANNOT_LOAD: Final = 2  # coming back will not help: no reason to restart
EXIT_FAILED: Final = 1

# What a wrong model, a wrong setting, a missing file or package and a full memory raise; load.py
# turns what else a model makes fail into one of these.
_EXPECTED: Final = (ValueError, OSError, ImportError, MemoryError)


class StepRunner(Protocol):
    """The loaded model with its KV pool."""

    def launch(self, plan: StepPlan) -> LaunchedStep: ...

    def ready(self) -> link_pb2.Ready: ...


Build = Callable[[link_pb2.Configure, Progress], StepRunner]


def serve(link: SchedulerLink, build: Build) -> int:
    """Session after session, until loading or the device fails: the exit code.

    Raises LinkClosed. A step that outlives the Configure's step_timeout ends the process.
    """
    watchdog = Watchdog(link)
    watchdog.start()
    try:
        return _serve(link, build, watchdog)
    finally:
        watchdog.stop()


def _serve(link: SchedulerLink, build: Build, watchdog: Watchdog) -> int:
    runner: StepRunner | None = None
    built: link_pb2.Configure | None = None
    while True:
        systemd.notify("STATUS=waiting for the scheduler")
        session = link.accept()
        watchdog.limit = session.configure.step_timeout
        wanted = link_pb2.Configure()
        wanted.CopyFrom(session.configure)
        wanted.ClearField("step_timeout")  # which changes nothing about the runner
        if runner is None or built != wanted:
            runner = None  # its memory is needed for the next one
            gc.collect()  # what it consists of refers to each other
            try:
                runner = _load(link, session, build)
            except Exception as error:  # whatever it is, the scheduler must hear of it
                return _report_failed_load(session, error)
            built = wanted
        else:
            logger.info("the scheduler asks for the model that is loaded: kept")
        link.set_busy("idle")
        session.send_ready(runner.ready())
        systemd.notify(f"STATUS=serving {session.configure.model}")
        try:
            run_steps(link, session, runner)
        except DeviceFailed:
            return EXIT_FAILED  # a new process gets a fresh device context
        except SessionEnded:
            logger.info("session ended after step %d", session.last_finished_step)


def run_steps(link: SchedulerLink, session: Session, runner: StepRunner) -> None:
    """Plans in, results out; a step may be launched while the one before it runs.

    Raises SessionEnded when all that was launched has ended, or DeviceFailed.
    """
    completion = Completion(link, session)
    try:
        while True:
            _run_one(session, runner, completion)
    except SessionEnded:
        completion.finish()
        raise


def _run_one(session: Session, runner: StepRunner, completion: Completion) -> None:
    try:
        received = session.receive()
    except PlanRefused as error:
        logger.error("%s", error)
        completion.fault(error.step_id, str(error))
        _wait_for_resume(session)
        return
    plan = received.plan
    completion.begin(plan.step_id)
    queued = time.monotonic() - received.at
    try:
        if plan.awaits_mask:
            raise NotImplementedError("this worker takes no masks (constrained sampling)")
        launched = runner.launch(plan)
    except DeviceFailed as error:
        logger.critical("step %d failed: %s", plan.step_id, error, exc_info=error)
        raise
    except Exception as error:  # the requests of the step may fail, the worker must not
        logger.exception("step %d failed", plan.step_id)
        completion.fault(plan.step_id, _describe(error))
        _wait_for_resume(session)
        return
    completion.add(launched, int(queued * 1e6))


def _wait_for_resume(session: Session) -> None:
    num_discarded = session.wait_for_resume()
    logger.info("resumed; %d plans were discarded", num_discarded)


def _load(link: SchedulerLink, session: Session, build: Build) -> StepRunner:
    said: tuple[str, int] | None = None

    def progress(what: str, fraction: float) -> None:
        nonlocal said
        link.set_busy("loading", progress=fraction)
        quarter = int(fraction * 4)
        if (what, quarter) != said:  # a line for every thing and every quarter of it
            said = (what, quarter)
            logger.info("%s: %d %%", what, round(fraction * 100))
            systemd.notify(f"STATUS={what}")

    started = time.monotonic()
    progress(f"loading {session.configure.model}", 0.0)
    runner = build(session.configure, progress)
    logger.info("loaded %s in %.1f s", session.configure.model, time.monotonic() - started)
    return runner


def _report_failed_load(session: Session, error: Exception) -> int:
    is_expected = isinstance(error, _EXPECTED) or type(error).__name__ == "OutOfMemoryError"
    message = f"cannot load {session.configure.model!r}: {_describe(error)}"
    logger.error("%s", message, exc_info=None if is_expected else error)
    if is_expected:
        logger.debug("where it failed", exc_info=error)
    systemd.notify(f"STATUS={message}")
    session.send_fault(-1, message, is_fatal=is_expected)
    return EXIT_CANNOT_LOAD if is_expected else EXIT_FAILED


def _describe(error: Exception) -> str:
    """One line; the kind of error stands before it unless it is one whose text says enough."""
    text = " ".join(str(error).split()) or "no further word"
    return text if isinstance(error, _EXPECTED) else f"{type(error).__name__}: {text}"
