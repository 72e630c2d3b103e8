"""What runs beside the calls: an exception in it ends the process, and is logged."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator

import pytest

from scheduler_svc.front import background
from scheduler_svc.front.streams import LiveStreams

SECONDS = 10.0  # more than anything here takes


class Crashes:
    """What `on_crash` was told."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.came = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self, error: BaseException) -> None:
        self.errors.append(error)
        self._loop.call_soon_threadsafe(self.came.set)


@pytest.fixture
async def crashes() -> Iterator[Crashes]:
    crashes = Crashes()
    with background.ends_the_process(crashes):
        yield crashes


async def test_a_task_that_fails(crashes: Crashes, caplog: pytest.LogCaptureFixture) -> None:
    """Health that is mirrored no more would send requests to a server without a worker."""

    async def fails() -> None:
        raise ValueError("the mirror broke")

    background.spawn(fails(), "mirror")
    await asyncio.wait_for(crashes.came.wait(), SECONDS)
    assert [str(error) for error in crashes.errors] == ["the mirror broke"]
    assert "task mirror failed" in caplog.text
    assert "Traceback" in caplog.text


async def test_a_task_that_ends_or_is_cancelled(crashes: Crashes) -> None:
    """That is what every stop does."""

    async def waits(event: asyncio.Event) -> None:
        await event.wait()

    done, never = asyncio.Event(), asyncio.Event()
    tasks = [background.spawn(waits(event), "waits") for event in (done, never)]
    done.set()
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait(tasks)
    await asyncio.sleep(0)
    assert crashes.errors == []


async def test_a_callback_that_fails(crashes: Crashes) -> None:
    """Events that are lost on their way to the streams would leave clients waiting for ever."""
    LiveStreams(asyncio.get_running_loop()).deliver(5)  # type: ignore[arg-type]
    await asyncio.wait_for(crashes.came.wait(), SECONDS)
    assert isinstance(crashes.errors[0], TypeError)


async def test_a_callback_of_a_library_is_logged_only(
    crashes: Crashes, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC's event loop meets errors that it survives; they are no reason to drop all streams."""
    asyncio.get_running_loop().call_soon(int, "x")
    await asyncio.sleep(0.01)
    assert crashes.errors == []
    assert "invalid literal" in caplog.text


@pytest.mark.parametrize("error", [OSError("too many open files"), SystemExit(3)])
async def test_a_thread_that_fails(
    crashes: Crashes, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """Without the thread of the worker link nothing is heard of any worker again."""

    def fails() -> None:
        raise error

    threading.Thread(target=fails, name="worker-link").start()
    await asyncio.wait_for(crashes.came.wait(), SECONDS)
    assert crashes.errors == [error]
    with caplog.at_level(logging.CRITICAL):
        assert "thread worker-link ended" in caplog.text


async def test_handlers_are_given_back() -> None:
    """They are the process's, and tests share it."""
    before = asyncio.get_running_loop().get_exception_handler(), threading.excepthook
    with background.ends_the_process(lambda error: None):
        assert threading.excepthook is not before[1]
    assert (asyncio.get_running_loop().get_exception_handler(), threading.excepthook) == before
