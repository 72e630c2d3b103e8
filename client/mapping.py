"""Answers to many prompts, in their order, in a blocking and in an asyncio form.

So many requests run at once, and so many more may have finished before their turn, as bound what is
held in memory; prompts are drawn from their iterable when there is room for them. `on_progress` and
the iterable are called by whoever reads, in no other thread.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import grpc

from client.answers import Answer, with_siblings
from client.errors import ChairliftError, InvalidRequest

if TYPE_CHECKING:
    from client.aio_stream import AsyncTokenStream
    from client.blocking_stream import TokenStream

DEFAULT_CONCURRENCY: Final = 64
_WINDOW: Final = 4  # requests begun and not yet yielded, for each that may run

Result = Answer | ChairliftError


@dataclass(frozen=True, slots=True)
class MapProgress:
    """How far a `map` has come."""

    finished: int  # prompts, those that failed included
    failed: int
    total: int | None  # None where the prompts do not know their number
    completion_tokens: int


@dataclass(slots=True)
class _Source:
    """The prompts, and the error that ends them early."""

    prompts: Iterator[Any]
    has_more: bool = True
    error: Exception | None = None

    def draw(self) -> Any:
        """The next prompt; `has_more` is false if there is none."""
        try:
            return next(self.prompts)
        except StopIteration:
            self.has_more = False
        except Exception as error:  # raised in its turn, after the answers before it
            self.has_more, self.error = False, error
        return None


@dataclass(slots=True)
class _Progress:
    total: int | None
    report: Callable[[MapProgress], None] | None
    finished: int = 0
    failed: int = 0
    completion_tokens: int = 0

    def note(self, result: Result) -> None:
        self.finished += 1
        if isinstance(result, Answer):
            for answer in (result, *result.siblings):
                self.completion_tokens += answer.usage.completion_tokens
        else:
            self.failed += 1
        if self.report is not None:
            self.report(MapProgress(self.finished, self.failed, self.total, self.completion_tokens))


def _begin(
    prompts: Iterable[Any], concurrency: int, on_progress: Callable[[MapProgress], None] | None
) -> tuple[_Source, _Progress]:
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}; allowed: at least 1")
    total = len(prompts) if isinstance(prompts, Sized) else None
    return _Source(iter(prompts)), _Progress(total, on_progress)


def _misfit(error: TypeError | ValueError) -> InvalidRequest:
    """An error for a prompt that no request can hold: one item, and not the end of all."""
    return InvalidRequest(str(error), grpc.StatusCode.INVALID_ARGUMENT)


@dataclass(slots=True, eq=False)
class _Workers:
    """Threads that run requests; `stop` cancels those that run."""

    start: Callable[[Any], TokenStream]
    finished: queue.SimpleQueue[Future[Result]] = field(default_factory=queue.SimpleQueue)
    _streams: set[TokenStream] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_stopped: bool = False

    def answer(self, prompt: Any) -> Result:
        with self._lock:
            if self._is_stopped:
                return ChairliftError("the map was left", grpc.StatusCode.CANCELLED)
            try:
                stream = self.start(prompt)
            except (TypeError, ValueError) as error:
                return _misfit(error)
            self._streams.add(stream)
        try:
            answers = stream.answers()
            if not answers:  # by `stop`
                return ChairliftError("the map was left", grpc.StatusCode.CANCELLED)
            return with_siblings(answers)
        except ChairliftError as error:
            return error
        finally:
            with self._lock:
                self._streams.discard(stream)

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            for stream in self._streams:
                stream.cancel()


def ordered_answers(
    start: Callable[[Any], TokenStream],
    prompts: Iterable[Any],
    concurrency: int,
    on_progress: Callable[[MapProgress], None] | None,
) -> Iterator[Result]:
    """Yields what `start` has to say to each prompt; ValueError if `concurrency` is below 1."""
    source, progress = _begin(prompts, concurrency, on_progress)

    def answers() -> Iterator[Result]:
        workers = _Workers(start)
        threads = ThreadPoolExecutor(concurrency, thread_name_prefix="chairlift-map")
        pending: deque[Future[Result]] = deque()
        try:
            while True:
                while source.has_more and len(pending) < _WINDOW * concurrency:
                    prompt = source.draw()
                    if source.has_more:
                        pending.append(threads.submit(workers.answer, prompt))
                        pending[-1].add_done_callback(workers.finished.put)
                    if pending and pending[0].done():
                        break
                while not workers.finished.empty():
                    progress.note(workers.finished.get().result())
                if not pending:
                    break
                if pending[0].done():
                    yield pending.popleft().result()
                else:
                    progress.note(workers.finished.get().result())
        finally:
            workers.stop()
            threads.shutdown(cancel_futures=True)
        if source.error is not None:
            raise source.error

    return answers()


def async_ordered_answers(
    start: Callable[[Any], AsyncTokenStream],
    prompts: Iterable[Any],
    concurrency: int,
    on_progress: Callable[[MapProgress], None] | None,
) -> AsyncIterator[Result]:
    """The same for asyncio."""
    source, progress = _begin(prompts, concurrency, on_progress)

    async def answers() -> AsyncIterator[Result]:
        slots = asyncio.Semaphore(concurrency)
        finished: asyncio.Queue[asyncio.Task[Result]] = asyncio.Queue()
        pending: deque[asyncio.Task[Result]] = deque()

        async def answer(prompt: Any) -> Result:
            async with slots:
                try:
                    return with_siblings(await start(prompt).answers())
                except (TypeError, ValueError) as error:
                    return _misfit(error)
                except ChairliftError as error:
                    return error

        try:
            while True:
                while source.has_more and len(pending) < _WINDOW * concurrency:
                    prompt = source.draw()
                    if source.has_more:
                        pending.append(asyncio.ensure_future(answer(prompt)))
                        pending[-1].add_done_callback(finished.put_nowait)
                        await asyncio.sleep(0)  # it starts before the next prompt is drawn
                    if pending and pending[0].done():
                        break
                while not finished.empty():
                    progress.note(finished.get_nowait().result())
                if not pending:
                    break
                if pending[0].done():
                    yield pending.popleft().result()
                else:
                    progress.note((await finished.get()).result())
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        if source.error is not None:
            raise source.error

    return answers()
