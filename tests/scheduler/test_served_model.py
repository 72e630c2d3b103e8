"""Waiting for the model: from the first Status to a tokenizer, and the ways it can fail."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.engine.events import Status
from scheduler_svc.errors import Unavailable
from scheduler_svc.front.served_model import ServedModel
from scheduler_svc.text.tokenizer import Tokenizer
from tests.support.fake_engine import FACTS
from tests.support.small_tokenizers import chat

READY = Status("ready", FACTS)
SECONDS = 10.0  # more than anything here takes
SLOW = threading.Event()  # lets the tokenizer of /slow be loaded
Make = Callable[..., tuple[ServedModel, list[str]]]


@pytest.fixture
async def make() -> Make:
    def make_one(**options: Any) -> tuple[ServedModel, list[str]]:
        loaded: list[str] = []

        def load(path: str) -> Tokenizer:
            loaded.append(path)
            if path == "/broken":
                raise OSError("no tokenizer.json")
            if path == "/slow":
                assert SLOW.wait(SECONDS)
            return Tokenizer(chat())

        loop = asyncio.get_running_loop()
        return ServedModel("tiny", loop, **{"load_tokenizer": load, **options}), loaded

    return make_one


async def test_waiters_get_the_model_once_it_is_ready(make: Make) -> None:
    """Requests that come while a model loads must not be refused."""
    served, loaded = make()
    waiting = asyncio.create_task(served.wait())
    served.on_status(Status(worker="loading"))
    served.on_status(READY)
    model = await asyncio.wait_for(waiting, 5)
    assert (model.name, model.facts) == ("tiny", FACTS)
    assert loaded == [FACTS.model_path]
    assert served.is_ready


async def test_a_lost_worker_keeps_the_model(make: Make) -> None:
    """Its requests run again elsewhere, and new ones may queue; the tokenizer is not read again."""
    served, loaded = make()
    served.on_status(READY)
    await served.wait()
    served.on_status(replace(READY, worker="connecting"))
    await served.wait_until_ready_is(False)
    assert (await served.wait()).facts == FACTS
    smaller = replace(FACTS, pool_tokens=64)
    served.on_status(replace(READY, model=smaller))
    await served.wait_until_ready_is(True)
    assert served.model.facts == smaller
    assert len(loaded) == 1


async def test_grammars_outlive_a_worker_but_not_a_vocabulary(make: Make) -> None:
    """Each new worker starts another process for trials; or masks are those of another model."""
    served, _ = make()
    served.on_status(READY)
    grammars = (await served.wait()).grammars
    smaller = replace(FACTS, pool_tokens=64)
    for facts, is_same in ((smaller, True), (replace(FACTS, vocab_size=299), False)):
        served.on_status(replace(READY, worker="connecting"))
        await served.wait_until_ready_is(False)
        served.on_status(replace(READY, model=facts))
        await served.wait_until_ready_is(True)
        assert (served.model.grammars is grammars) is is_same
    served.close()


async def test_another_model_brings_another_tokenizer(make: Make) -> None:
    """Decoding with the old one would give nonsense."""
    served, loaded = make()
    served.on_status(READY)
    await served.wait()
    SLOW.clear()
    other = replace(FACTS, model_path="/slow")
    served.on_status(replace(READY, model=other))
    await served.wait_until_ready_is(False)
    SLOW.set()
    assert (await asyncio.wait_for(served.wait(), SECONDS)).facts == other
    assert loaded == [FACTS.model_path, other.model_path]


async def test_a_refused_model_ends_waiting(make: Make) -> None:
    """Nobody should wait for what will never come."""
    served, _ = make()
    waiting = asyncio.create_task(served.wait())
    served.on_status(Status(fatal_error="gpt9 is not supported"))
    with pytest.raises(Unavailable, match="gpt9 is not supported"):
        await asyncio.wait_for(waiting, 5)
    with pytest.raises(Unavailable, match="gpt9"):
        await served.wait()
    served.on_status(READY)  # a repaired worker
    await served.wait_until_ready_is(True)
    assert (await served.wait()).facts == FACTS


async def test_a_missing_tokenizer_is_told_and_tried_again(make: Make) -> None:
    """A worker can be ready whose folder has no tokenizer: say so, and look again later."""
    served, loaded = make()
    broken = replace(FACTS, model_path="/broken")
    waiting = asyncio.create_task(served.wait())
    served.on_status(replace(READY, model=broken))
    with pytest.raises(Unavailable, match="configuration of /broken cannot be loaded"):
        await asyncio.wait_for(waiting, 5)
    assert not served.is_ready
    served.on_status(replace(READY, worker="connecting", model=broken))
    served.on_status(READY)
    await served.wait_until_ready_is(True)
    assert loaded[-1] == FACTS.model_path


class PanicException(BaseException):
    """What pyo3 raises for a panic in Rust: no Exception."""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TypeError("'<' not supported"), "TypeError: '<' not supported"),
        (ImportError("cannot import name"), "ImportError: cannot import name"),
        (MemoryError(), "MemoryError"),
        (RecursionError("too deep"), "RecursionError: too deep"),
        (SystemExit("a library gives up"), "SystemExit: a library gives up"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (PanicException("index out of bounds"), "PanicException: index out of bounds"),
        (asyncio.CancelledError(), "CancelledError"),
        (StopIteration(1), "StopIteration: 1"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
async def test_whatever_ends_the_loading_is_told(
    make: Make, error: BaseException, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the service is never ready, its requests wait for ever, and nobody knows why."""
    attempts: list[str] = []

    def load(path: str) -> Tokenizer:
        attempts.append(path)
        if len(attempts) == 1:
            raise error
        return Tokenizer(chat())

    served, _ = make(load_tokenizer=load)
    waiting = asyncio.create_task(served.wait())
    with caplog.at_level(logging.ERROR):
        served.on_status(READY)
        with pytest.raises(Unavailable, match=told):
            await asyncio.wait_for(waiting, SECONDS)
    assert told in (served.error or "")
    assert told in await asyncio.wait_for(served.wait_for_error(), SECONDS)
    assert told in caplog.text
    assert not served.is_ready
    # the same model of another worker is a reason to try again
    served.on_status(replace(READY, worker="connecting"))
    served.on_status(READY)
    await asyncio.wait_for(served.wait_until_ready_is(True), SECONDS)
    assert len(attempts) == 2


async def test_waiting_has_a_limit(make: Make) -> None:
    """A client that would rather go elsewhere waits for a worker that never comes."""
    served, _ = make(wait_seconds=0.05)
    with pytest.raises(Unavailable, match=r"within 0\.05 s"):
        await served.wait()
    with pytest.raises(Unavailable, match="not loaded yet"):
        _ = served.model
