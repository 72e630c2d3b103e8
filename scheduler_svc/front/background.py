"""What runs beside the calls must not die unseen.

An exception in a call reaches its client. One in a thread, in a callback of the event loop or in a
task that nobody awaits reaches nobody, and leaves a process that looks well and does half of its
work. `ends_the_process` makes each of them a crash: it is logged, and the process ends, to be
started anew.

Exceptions in callbacks and tasks of libraries are logged only: gRPC's event loop survives its own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final

log = logging.getLogger(__name__)

_PACKAGE: Final = __name__.partition(".")[0]
_RUNNING: Final[set[asyncio.Task[None]]] = set()  # the event loop keeps only weak references


def spawn(coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """A task that runs until it is cancelled or done; its exception goes to the loop's handler, as
    that of a callback does, at once."""
    task = asyncio.get_running_loop().create_task(coroutine, name=name)
    _RUNNING.add(task)
    task.add_done_callback(_look_at)
    return task


def _look_at(task: asyncio.Task[None]) -> None:
    _RUNNING.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler(
            {"message": f"task {task.get_name()} failed", "exception": error, "is_ours": True}
        )


@contextmanager
def ends_the_process(on_crash: Callable[[BaseException], None]) -> Iterator[None]:
    """Within it `on_crash` is told of what ends a thread, a callback of this package or a task of
    `spawn`; from any thread. Inside a running event loop."""
    loop = asyncio.get_running_loop()
    in_loop, in_thread = loop.get_exception_handler(), threading.excepthook

    def handle_in_loop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        is_callback = "handle" in context and error is not None and _is_ours(error.__traceback__)
        if error is None or not (is_callback or "is_ours" in context):
            loop.default_exception_handler(context)
            return
        log.critical("%s", context["message"], exc_info=error)
        on_crash(error)

    def handle_in_thread(args: threading.ExceptHookArgs) -> None:
        error = args.exc_value or args.exc_type()
        name = args.thread.name if args.thread is not None else "unknown"
        log.critical("thread %s ended: %s", name, error, exc_info=error)
        on_crash(error)

    loop.set_exception_handler(handle_in_loop)
    threading.excepthook = handle_in_thread
    try:
        yield
    finally:
        loop.set_exception_handler(in_loop)
        threading.excepthook = in_thread


def _is_ours(trace: TracebackType | None) -> bool:
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
            return True
        trace = trace.tb_next
    return False
