"""The model being served: the facts that its worker reported, and its tokenizer.

Follows the engine's Status. When a worker is ready with a model, its tokenizer is loaded in a
thread; requests that come before that wait for it in `wait`. If loading fails, they get the reason,
and the next worker that becomes ready starts another attempt. A worker lost later changes nothing:
the model stays known, and requests queue in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from scheduler_svc.engine.events import ModelFacts, Status
from scheduler_svc.errors import Unavailable
from scheduler_svc.grammar.grammars import Grammars
from scheduler_svc.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Model:
    """Everything the API needs to read a request and to write an answer."""

    name: str  # what clients see
    facts: ModelFacts
    tokenizer: Tokenizer
    grammars: Grammars

    @classmethod
    def of(cls, name: str, facts: ModelFacts, tokenizer: Tokenizer) -> Self:
        """A model whose grammars are yet to be prepared."""
        grammars = Grammars(tokenizer.to_json, facts.vocab_size, tokenizer.eos_token_ids)
        return cls(name, facts, tokenizer, grammars)


class ServedModel:
    """Belongs to the event loop's thread, except `on_status`."""

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        *,
        wait_seconds: float = 0.0,
        load_tokenizer: Callable[[str], Tokenizer] = Tokenizer.load,
    ) -> None:
        self.status = Status()
        self._name = name
        self._loop = loop
        self._wait_seconds = wait_seconds  # 0 = forever
        self._load = load_tokenizer
        self._model: Model | None = None
        self._loading: str | None = None  # the model's path
        self._load_error: str | None = None
        self._changed = asyncio.Event()  # a new one after each change

    def on_status(self, status: Status) -> None:
        """Called in the engine's thread."""
        self._loop.call_soon_threadsafe(self._update, status)

    @property
    def is_ready(self) -> bool:
        """A request would be scheduled immediately."""
        return self.status.is_ready and self._model is not None and self.error is None

    @property
    def error(self) -> str | None:
        """Why waiting for a model is pointless; None when it is not."""
        return self.status.fatal_error or self._load_error

    @property
    def is_awaited(self) -> bool:
        """A request would have to wait for the model."""
        return self._model is None and self.error is None

    @property
    def model(self) -> Model:
        """Raises Unavailable while there is none."""
        if self._model is None:
            reason = self.error or f"the model is not loaded yet ({self._obstacle()})"
            raise Unavailable(reason)
        return self._model

    async def wait(self) -> Model:
        """The model, once it is loaded. Raises Unavailable."""
        try:
            async with asyncio.timeout(self._wait_seconds or None):
                while self.is_awaited:
                    await self._changed.wait()
        except TimeoutError:
            raise Unavailable(
                f"no worker was ready within {self._wait_seconds:g} s (worker_wait); "
                f"{self._obstacle()}"
            ) from None
        if self.error is not None:
            raise Unavailable(self.error)
        return self.model

    def _obstacle(self) -> str:
        state = f"worker: {self.status.worker}"
        return state if self._loading is None else f"{state}, its tokenizer is being loaded"

    async def wait_until_ready_is(self, value: bool) -> None:
        while self.is_ready != value:
            await self._changed.wait()

    async def wait_for_error(self) -> str:
        """Waits until waiting for the model is pointless; returns the reason."""
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
            return  # only the counts, which change with every step
        if status.is_ready and status.model is not None:
            self._follow(status.model)
        self._announce()

    def _follow(self, facts: ModelFacts) -> None:
        if self._model is not None and self._model.facts.model_path == facts.model_path:
            self._set_model(facts, self._model.tokenizer)
        elif self._loading != facts.model_path:
            self._model = None
            self._load_error = None
            self._loading = facts.model_path
            logger.info("loading tokenizer and configuration of %s", facts.model_path)
            # a daemon thread: a stopping process must not wait for files, or for a network
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
        except BaseException as error:  # including a library's SystemExit and a panic in Rust
            is_expected = isinstance(error, OSError | ValueError)
            what = str(error) if is_expected else f"{type(error).__name__}: {error}"
            outcome = f"the tokenizer and configuration of {path} cannot be loaded: {what}"
            logger.error("%s", outcome, exc_info=None if is_expected else error)
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._loaded, path, outcome)

    def _loaded(self, path: str, outcome: Tokenizer | str) -> None:
        if self._loading != path:
            return  # another model is being loaded by now
        self._loading = None
        facts = self.status.model
        if isinstance(outcome, str):
            self._load_error = outcome
        elif facts is not None:
            self._set_model(facts, outcome)
        self._announce()

    def _set_model(self, facts: ModelFacts, tokenizer: Tokenizer) -> None:
        """Keeps the grammars where they fit. Else they are prepared in a thread: that takes a
        while, and only constrained requests wait for it."""
        old = self._model
        if old is not None and (old.tokenizer, old.facts.vocab_size) == (
            tokenizer,
            facts.vocab_size,
        ):
            self._model = replace(old, facts=facts)
            return
        self.close()
        self._model = Model.of(self._name, facts, tokenizer)
        threading.Thread(target=self._model.grammars.prepare, name="grammars", daemon=True).start()

    def close(self) -> None:
        """Ends what the model's grammars have started."""
        if self._model is not None:
            self._model.grammars.close()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
