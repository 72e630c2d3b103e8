"""The model that is served: what its worker said about it, and its tokenizer.

Follows the engine's Status. When a worker is ready with a model, its tokenizer is loaded in a
thread; requests that come before that wait here. Whatever ends the loading is told to them, and the
next worker that is ready is a reason to try again. A worker that is lost later changes nothing: the
model stays known, requests queue in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.engine.events import ModelFacts, Status
from scheduler_svc.errors import QueueFull, Unavailable
from scheduler_svc.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

NO_WORKER = Status(worker="none", model=None, fatal_error=None, num_running=0, num_waiting=0)


@dataclass(frozen=True, slots=True)
class Model:
    """All that the API needs to read a request and to write an answer."""

    name: str  # what clients see
    facts: ModelFacts
    tokenizer: Tokenizer


class ServedModel:
    """Belongs to the event loop's thread, but for `on_status`."""

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        *,
        max_waiting: int = 0,
        wait_seconds: float = 0.0,
        load_tokenizer: Callable[[str], Tokenizer] = Tokenizer.load,
    ) -> None:
        self.status = NO_WORKER
        self._name = name
        self._loop = loop
        self._max_waiting = max_waiting  # 0 = no limit
        self._wait_seconds = wait_seconds  # 0 = for ever
        self._load = load_tokenizer
        self._num_waiting = 0
        self._model: Model | None = None
        self._loading: str | None = None  # the model's path
        self._load_error: str | None = None
        self._changed = asyncio.Event()  # a new one after each change

    def on_status(self, status: Status) -> None:
        """From the engine's thread."""
        self._loop.call_soon_threadsafe(self._update, status)

    @property
    def is_ready(self) -> bool:
        """A request that came now would be worked on at once."""
        return self.status.is_ready and self._model is not None and self.error is None

    @property
    def error(self) -> str | None:
        """Why waiting is of no use."""
        return self.status.fatal_error or self._load_error

    @property
    def model(self) -> Model:
        """Raises Unavailable while there is none."""
        if self._model is None:
            reason = self.error or f"the model is not loaded yet ({self._obstacle()})"
            raise Unavailable(reason)
        return self._model

    async def wait(self) -> Model:
        """The model, once it is there. Raises Unavailable or QueueFull."""
        if self.error is not None:
            raise Unavailable(self.error)
        if self._model is not None:
            return self._model
        if 0 < self._max_waiting <= self._num_waiting:
            raise QueueFull(self._num_waiting, self._max_waiting)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._wait_seconds or None):
                while self._model is None and self.error is None:
                    await self._changed.wait()
        except TimeoutError:
            raise Unavailable(
                f"no worker was ready within {self._wait_seconds:g} s (worker_wait); "
                f"{self._obstacle()}"
            ) from None
        finally:
            self._num_waiting -= 1
        if self.error is not None:
            raise Unavailable(self.error)
        return self.model

    def _obstacle(self) -> str:
        state = f"worker: {self.status.worker}"
        return state if self._loading is None else f"{state}, its tokenizer is being read"

    async def wait_until_ready_is(self, value: bool) -> None:
        while self.is_ready != value:
            await self._changed.wait()

    async def wait_for_error(self) -> str:
        """Until waiting is of no use; why."""
        while self.error is None:
            await self._changed.wait()
        return self.error

    def _update(self, status: Status) -> None:
        old, self.status = self.status, status
        if (old.worker, old.model, old.fatal_error) == (
            status.worker,
            status.model,
            status.fatal_error,
        ):
            return  # only the counts: these change with every step
        if status.is_ready and status.model is not None:
            self._follow(status.model)
        self._announce()

    def _follow(self, facts: ModelFacts) -> None:
        if self._model is not None and self._model.facts.model_path == facts.model_path:
            self._model = Model(self._name, facts, self._model.tokenizer)
        elif self._loading != facts.model_path:
            self._model = None
            self._load_error = None
            self._loading = facts.model_path
            log.info("reading tokenizer and configuration of %s", facts.model_path)
            # a daemon: a process that is told to stop must not wait for files, or for a network
            threading.Thread(
                target=self._load_in_thread,
                args=(facts.model_path,),
                name="tokenizer",
                daemon=True,
            ).start()

    def _load_in_thread(self, path: str) -> None:
        outcome: Tokenizer | str
        try:
            outcome = self._load(path)
        except BaseException as error:  # a library's SystemExit and a panic in Rust, too
            is_told = isinstance(error, OSError | ValueError)
            what = str(error) if is_told else f"{type(error).__name__}: {error}"
            outcome = f"the tokenizer and configuration of {path} cannot be loaded: {what}"
            log.error("%s", outcome, exc_info=None if is_told else error)
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._loaded, path, outcome)

    def _loaded(self, path: str, outcome: Tokenizer | str) -> None:
        if self._loading != path:
            return  # another model is loading by now
        self._loading = None
        facts = self.status.model
        if isinstance(outcome, str):
            self._load_error = outcome
        elif facts is not None:
            self._model = Model(self._name, facts, outcome)
        self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
