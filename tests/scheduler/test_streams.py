"""Live streams: order, merging, and which ids are live."""

from __future__ import annotations

import asyncio
import threading

import pytest

from scheduler_svc.errors import DuplicateRequest, Unavailable
from scheduler_svc.events import Delta, Event, Failed
from scheduler_svc.streams import LiveStreams, ended_unseen


@pytest.fixture
async def streams() -> LiveStreams:
    return LiveStreams(asyncio.get_running_loop())


async def settle() -> None:
    """Lets what was handed to the loop run."""
    await asyncio.sleep(0)


async def test_events_come_in_order_from_another_thread(streams: LiveStreams) -> None:
    """The engine is another thread; an event lost or swapped is a wrong answer."""
    stream = streams.open("a")
    events: list[Event] = [Delta("a", [1], "x"), Delta("b", [9], "?"), ended_unseen("a")]
    thread = threading.Thread(target=streams.deliver, args=(events,))
    thread.start()
    assert await stream.next() == Delta("a", [1], "x")
    assert await stream.next() == ended_unseen("a")
    thread.join()


async def test_a_slow_reader_finds_one_merged_delta(streams: LiveStreams) -> None:
    """A delta per token for a reader that does not read would fill the memory."""
    stream = streams.open("a")
    streams.deliver([Delta("a", [1], "x"), Delta("a", [2, 3], "")])
    streams.deliver([Delta("a", [], "y")])
    await settle()
    assert await stream.next() == Delta("a", [1, 2, 3], "xy")
    assert stream.take() is None


async def test_tokens_without_text_are_news(streams: LiveStreams) -> None:
    """A token in the middle of a character has no text, yet clients count tokens."""
    stream = streams.open("a")
    streams.deliver([Delta("a", [1], "")])
    assert await stream.next() == Delta("a", [1], "")


async def test_a_live_id_is_taken(streams: LiveStreams) -> None:
    """Two requests of one id would get each other's tokens."""
    stream = streams.open("a")
    with pytest.raises(DuplicateRequest):
        streams.open("a")
    streams.close(stream)
    streams.open("a")


async def test_an_abandoned_id_stays_taken_until_the_engine_says_so(streams: LiveStreams) -> None:
    """Late events of the first request would reach the second."""
    stream = streams.open("a")
    stream.is_submitted = True
    streams.close(stream)
    with pytest.raises(DuplicateRequest):
        streams.open("a")
    streams.deliver([Delta("a", [1], "late"), ended_unseen("a")])
    await settle()
    again = streams.open("a")
    assert again.take() is None


async def test_idle_means_that_nothing_is_live(streams: LiveStreams) -> None:
    """A drain that ends early cuts answers off; one that never ends hangs the stop."""
    await asyncio.wait_for(streams.wait_idle(), 1)
    stream = streams.open("a")
    waiting = asyncio.create_task(streams.wait_idle())
    await settle()
    assert not waiting.done()
    streams.close(stream)
    await asyncio.wait_for(waiting, 1)


async def test_refusing_and_failing(streams: LiveStreams) -> None:
    """What a drain does: nobody new, those that wait here first, the rest at its end."""
    here, there = streams.open("here"), streams.open("there")
    there.is_submitted = True
    error = Unavailable("draining")
    streams.refuse(error)
    with pytest.raises(Unavailable, match="draining"):
        streams.open("c")
    streams.fail_waiting(error)
    assert await here.next() == Failed("here", error)
    assert there.ending is None
    streams.fail_all(error)
    assert await there.next() == Failed("there", error)
