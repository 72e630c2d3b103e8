"""The worker's main loop: receive a Configure, build a runner, run plan after plan.

A step that raises is reported as a Fault, and plans are discarded until the scheduler sends Resume.
If a model cannot be loaded, the scheduler is told and the process exits. A new session with the
same Configure reuses the runner: the weights are the same, and the content of its KV pool is never
read, as the new scheduler knows no block in it.

Owns: the order of all this. Does not own: the socket (link.py), what a step computes
(worker/runner.py), waiting for it (completion.py).
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
from worker.process.link import SchedulerLink
from worker.process.progress import Progress
from worker.process.session import PlanRefused, Session, SessionEnded
from worker.process.watchdog import Watchdog

logger = logging.getLogger(__name__)

EXIT_CANNOT_LOAD: Final = 2  # a restart would fail in the same way
EXIT_FAILED: Final = 1

# Raised for a wrong model, a wrong setting, a missing file or package and for lack of memory;
# load.py turns whatever else a model makes fail into one of these.
_EXPECTED: Final = (ValueError, OSError, ImportError, MemoryError)


class StepRunner(Protocol):
    """The loaded model with its KV pool."""

    def launch(self, plan: StepPlan, mask_of: Callable[[], link_pb2.Mask]) -> LaunchedStep: ...

    def ready(self) -> link_pb2.Ready: ...


Build = Callable[[link_pb2.Configure, Progress], StepRunner]


def serve(link: SchedulerLink, build: Build) -> int:
    """Serves session after session until loading or the device fails; returns the exit code.

    Raises LinkClosed. A step that takes longer than the Configure's step_timeout ends the process.
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
        wanted.ClearField("step_timeout")  # it does not concern the runner
        if runner is None or built != wanted:
            runner = None  # its memory is needed for the next one
            gc.collect()  # its parts reference each other
            try:
                runner = _load(link, session, build)
            except Exception as error:  # whatever it is, the scheduler must be told
                return _report_failed_load(session, error)
            built = wanted
        else:
            logger.info("the requested model is already loaded; reusing it")
        link.set_busy("idle")
        session.send_ready(runner.ready())
        systemd.notify(f"STATUS=serving {session.configure.model}")
        try:
            run_steps(link, session, runner)
        except DeviceFailed:
            return EXIT_FAILED  # a new process gets a new device context
        except SessionEnded:
            logger.info("session ended after step %d", session.last_finished_step)


def run_steps(link: SchedulerLink, session: Session, runner: StepRunner) -> None:
    """Plans in, results out; a step may be launched while the one before it runs.

    Raises SessionEnded once every launched step has finished, or DeviceFailed.
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

    def mask_of() -> link_pb2.Mask:
        with completion.waiting_for_mask(plan.step_id):
            return session.wait_for_mask(plan.step_id)

    try:
        launched = runner.launch(plan, mask_of)
    except SessionEnded:
        raise
    except DeviceFailed as error:
        logger.critical("step %d failed: %s", plan.step_id, error, exc_info=error)
        raise
    except Exception as error:  # the step's requests may fail, the worker must not
        logger.exception("step %d failed", plan.step_id)
        completion.fault(plan.step_id, _describe(error))
        _wait_for_resume(session)
        return
    completion.add(launched, int(queued * 1e6))


def _wait_for_resume(session: Session) -> None:
    num_discarded = session.wait_for_resume()
    logger.info("resumed; %d plans were discarded", num_discarded)


def _load(link: SchedulerLink, session: Session, build: Build) -> StepRunner:
    reported: tuple[str, int] | None = None

    def progress(what: str, fraction: float) -> None:
        nonlocal reported
        link.set_busy("loading", progress=fraction)
        quarter = int(fraction * 4)
        if (what, quarter) != reported:  # a line for each stage, and for each quarter of one
            reported = (what, quarter)
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
        logger.debug("traceback of the failed load", exc_info=error)
    systemd.notify(f"STATUS={message}")
    session.send_fault(-1, message, is_fatal=is_expected)
    return EXIT_CANNOT_LOAD if is_expected else EXIT_FAILED


def _describe(error: Exception) -> str:
    """The error in one line, its type first unless the message says enough."""
    text = " ".join(str(error).split()) or "no details"
    return text if isinstance(error, _EXPECTED) else f"{type(error).__name__}: {text}"
