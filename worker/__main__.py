"""`python -m worker --connect ipc:///run/chairlift/worker.ipc`: one worker process.

Apart from the address, CPU threads and the log level, all settings come from the scheduler: model,
device, sizes. SIGTERM and SIGINT end the process at once with exit code 0, as the scheduler can
have any step computed again. Exit code 2: the model cannot be loaded here, or an argument is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any

from protos import link_pb2
from protos.link import PROTOCOL
from worker.kernels.build import build_ahead
from worker.process import systemd
from worker.process.control_group import usable_threads
from worker.process.curve import CurveKeys
from worker.process.link import SchedulerLink
from worker.process.loop import EXIT_CANNOT_LOAD, StepRunner, serve
from worker.process.progress import Progress

logger = logging.getLogger("worker")

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    logging.basicConfig(format=LOG_FORMAT, level=options.log_level.upper(), stream=sys.stderr)
    logging.getLogger("torch").setLevel(logging.WARNING)  # its INFO is about its internals
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _stop)
    # Before torch loads OpenMP: threads that spin while waiting take the cores from the scheduler
    # and from each other; on a busy machine a step then takes ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    _keep_freed_memory()
    _raise_descriptor_limit()
    build_ahead()  # the compiler runs during the imports
    link = None
    reason, is_failure = "the worker failed", True
    try:
        if not sys.stderr.isatty():
            # transformers' progress bars are noise in a log, where our own lines say the same
            os.environ.setdefault("TQDM_DISABLE", "1")
        with _garbage_collection_paused():
            import torch  # takes seconds; after the signals, so that Ctrl-C is clean from the start

        torch.set_num_threads(options.threads or usable_threads(torch.get_num_threads()))
        keys = CurveKeys.from_environment()
        if keys is None and options.connect.startswith("tcp://"):
            logger.warning("%s without CURVE keys: anybody on the network path can read every "
                           "prompt (see python -m pydoc worker.process.curve)",
                           options.connect)  # fmt: skip
        link = SchedulerLink(options.connect, hello(), keys)
        systemd.notify("READY=1")
        import_ahead()
        code = serve(link, build)
        reason = "the model cannot be loaded, or the device failed"
        return code
    except SystemExit:
        reason, is_failure = "the worker was told to stop", False
        raise
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return EXIT_CANNOT_LOAD
    finally:
        systemd.notify("STOPPING=1")
        if link is not None:
            link.close(reason, is_failure)
        logger.info("%s", reason)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m worker",
        description="Run the model that a scheduler asks for.",
    )
    parser.add_argument(
        "--connect",
        required=True,
        metavar="ADDRESS",
        help="the scheduler's worker_address: ipc://PATH or tcp://HOST:PORT",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="CPU threads (0: torch's choice, within the CPU quota)",
    )
    parser.add_argument(
        "--log-level", default="info", choices=["debug", "info", "warning", "error"]
    )
    options = parser.parse_args(arguments)
    if not options.connect.startswith(("ipc://", "tcp://")):
        parser.error(f"--connect is {options.connect!r}; allowed: ipc://PATH or tcp://HOST:PORT")
    if options.threads < 0:
        parser.error(f"--threads is {options.threads}; allowed: 0 or more")
    return options


def import_ahead() -> None:
    """Imports what `build` needs, which takes seconds, before the scheduler's Configure comes."""
    # `build` repeats a failed import, and then the scheduler is told
    with contextlib.suppress(ImportError), _garbage_collection_paused():
        importlib.import_module("worker.model.load")
        importlib.import_module("worker.runner")


def _keep_freed_memory() -> None:
    """Makes malloc keep large blocks. Every step allocates and frees large results; returned to the
    system, their pages would be zeroed anew each time: 12,000 to 17,000 pages, 40 ms, in a step
    that samples 64 rows with top_p; kept, none in most steps."""
    with contextlib.suppress(AttributeError, OSError):  # a C library without mallopt
        for parameter in (-1, -3):  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
            ctypes.CDLL(None).mallopt(parameter, 1 << 30)


def _raise_descriptor_limit() -> None:
    """A checkpoint may have hundreds of files, which some libraries open once per thread."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS allows less than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """For imports: modules are never garbage, and looking for some takes time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def build(configure: link_pb2.Configure, progress: Progress) -> StepRunner:
    """Loads the model and allocates its KV pool."""
    from worker.model.load import load_model
    from worker.runner import Runner

    return Runner(load_model(configure, progress), configure, progress=progress)


def hello() -> link_pb2.Hello:
    try:
        own_version = version("chairlift")
    except PackageNotFoundError:  # run from a source tree
        own_version = "unknown"
    return link_pb2.Hello(
        protocol=PROTOCOL,
        version=own_version,
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def _stop(signum: int, frame: FrameType | Any) -> None:
    for other in (signal.SIGTERM, signal.SIGINT):
        signal.signal(other, signal.SIG_IGN)  # stopping already
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
