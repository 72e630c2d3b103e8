"""Makes an exception in background work a crash, rather than letting it pass unnoticed.

An exception in a call reaches its client. One in a thread, in a callback of the event loop or in a
task that nobody awaits reaches nobody, and leaves a process that looks healthy but does half of its
work. Under `ends_the_process` each of them is logged and ends the process, to be restarted.

Exceptions in callbacks and tasks of libraries are only logged: gRPC survives its own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final

logger = logging.getLogger(__name__)

_PACKAGE: Final = __name__.partition(".")[0]
_RUNNING: Final[set[asyncio.Task[None]]] = set()  # the event loop keeps only weak references


def spawn(coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Starts a task that nobody need await: its exception goes to the loop's handler at once, like
    that of a callback."""
    task = asyncio.get_running_loop().create_task(coroutine, name=name)
    _RUNNING.add(task)
    task.add_done_callback(_report)
    return task


def _report(task: asyncio.Task[None]) -> None:
    _RUNNING.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler(
            {"message": f"task {task.get_name()} failed", "exception": error, "is_ours": True}
        )


@contextmanager
def ends_the_process(on_crash: Callable[[BaseException], None]) -> Iterator[None]:
    """Within it, `on_crash` gets the exception that ends a thread, a callback of this package or a
    task of `spawn`; it may be called from any thread. Needs a running event loop."""
    loop = asyncio.get_running_loop()
    in_loop, in_thread = loop.get_exception_handler(), threading.excepthook

    def handle_in_loop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        is_callback = "handle" in context and error is not None and _is_ours(error.__traceback__)
        if error is None or not (is_callback or "is_ours" in context):
            loop.default_exception_handler(context)
            return
        logger.critical("%s", context["message"], exc_info=error)
        on_crash(error)

    def handle_in_thread(args: threading.ExceptHookArgs) -> None:
        error = args.exc_value or args.exc_type()
        name = args.thread.name if args.thread is not None else "unknown"
        logger.critical("thread %s ended: %s", name, error, exc_info=error)
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
