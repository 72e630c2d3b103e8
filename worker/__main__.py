"""`python -m worker --connect ipc:///run/chairlift/worker.sock`: one worker process.

Where to connect is all it is told here; model, device and sizes come from the scheduler.
SIGTERM and SIGINT end it at once with exit code 0: whatever it was computing, the scheduler can
have it computed again. Exit code 2 means that the model cannot be loaded here.
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
    logging.getLogger("torch").setLevel(logging.WARNING)  # its INFO is about its own insides
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _stop)
    # Before torch loads OpenMP: threads that spin while they wait take the cores from the scheduler
    # and from each other, and a step takes ten times as long on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    _keep_freed_memory()
    _raise_descriptor_limit()
    build_ahead()  # a compiler works beside the imports
    link = None
    reason, is_failure = "the worker failed", True
    try:
        if not sys.stderr.isatty():
            # transformers' progress bars; in a log they are noise, and our own lines tell the same
            os.environ.setdefault("TQDM_DISABLE", "1")
        with _no_garbage():
            import torch  # seconds; after the signals, so that Ctrl-C is clean from the start

        torch.set_num_threads(options.threads or usable_threads(torch.get_num_threads()))
        keys = CurveKeys.from_environment()
        if keys is None and options.connect.startswith("tcp://"):
            logger.warning("%s without CURVE keys: whoever can reach it sees every prompt (%s)",
                           options.connect, "python -m pydoc worker.curve")  # fmt: skip
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
        description="Run the model for a scheduler, which says which one.",
    )
    parser.add_argument(
        "--connect", required=True, metavar="ADDRESS", help="ipc://PATH or tcp://HOST:PORT"
    )
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="CPU threads (0: as configured)"
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
    """What `build` needs: more seconds, which need not wait for the scheduler's Configure."""
    # what cannot be imported `build` meets again, and the scheduler is told
    with contextlib.suppress(ImportError), _no_garbage():
        importlib.import_module("worker.model.load")
        importlib.import_module("worker.runner")


def _keep_freed_memory() -> None:
    """Large results come and go with every step; given back to the system and taken again, their
    pages would be zeroed each time: 12,000 to 17,000 in a step of 64 rows that are sampled with
    top_p, 40 ms of the system's time; kept, none in most steps."""
    with contextlib.suppress(AttributeError, OSError):  # a C library without mallopt
        for parameter in (-1, -3):  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
            ctypes.CDLL(None).mallopt(parameter, 1 << 30)


def _raise_descriptor_limit() -> None:
    """A checkpoint may have hundreds of files, and each thread of some libraries opens its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """While modules load: they stay, and looking for what does not takes time."""
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
    """Who and where this is, and the memory of the device that `device = auto` would take."""
    total, available = _memory()
    try:
        own_version = version("chairlift")
    except PackageNotFoundError:  # run from a source tree
        own_version = "unknown"
    return link_pb2.Hello(
        protocol=PROTOCOL,
        version=own_version,
        host=socket.gethostname(),
        pid=os.getpid(),
        memory_total=total,
        memory_available=available,
    )


def _memory() -> tuple[int, int]:
    """(total, available) bytes."""
    import psutil  # type: ignore[import-untyped]  # its stubs are no dependency
    import torch

    if torch.cuda.is_available():
        available, total = torch.cuda.mem_get_info()
        return total, available
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _stop(signum: int, frame: FrameType | Any) -> None:
    for other in (signal.SIGTERM, signal.SIGINT):
        signal.signal(other, signal.SIG_IGN)  # stopping already
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
