"""Live streams: order, merging, and which ids are live."""

from __future__ import annotations

import asyncio
import threading

import pytest

from scheduler_svc.core.request import FinishReason
from scheduler_svc.engine.events import Delta, Event, Failed, Finished
from scheduler_svc.errors import DuplicateRequest, Unavailable
from scheduler_svc.front.streams import EVENTS_PER_TURN, LiveStreams


@pytest.fixture
async def streams() -> LiveStreams:
    return LiveStreams(asyncio.get_running_loop())


def end(request_id: str, index: int = 0) -> Finished:
    return Finished(request_id, index, FinishReason.LENGTH)


async def settle() -> None:
    """Lets what was handed to the loop run."""
    await asyncio.sleep(0)


async def test_events_come_in_order_from_another_thread(streams: LiveStreams) -> None:
    """The engine is another thread; an event lost or swapped is a wrong answer."""
    stream = streams.open("a")
    events: list[Event] = [Delta("a", 0, [1], "x"), Delta("b", 0, [9], "?"), end("a")]
    thread = threading.Thread(target=streams.deliver, args=(events,))
    thread.start()
    assert await stream.next() == Delta("a", 0, [1], "x")
    assert await stream.next() == end("a")
    assert await stream.next() is None
    thread.join()


async def test_the_engine_sees_which_deltas_were_taken(streams: LiveStreams) -> None:
    """It merges what follows meanwhile: a delta per token would fill a slow reader's memory."""
    stream = streams.open("a", 2)
    first, second = Delta("a", 0, [1], "x"), Delta("a", 1, [2], "y")
    streams.deliver([first, second])
    await settle()
    assert (first.is_taken, second.is_taken) == (False, False)
    assert await stream.next() is first
    assert (first.is_taken, second.is_taken) == (True, False)


async def test_many_events_leave_the_loop_to_others(streams: LiveStreams) -> None:
    """A call that is just coming in waits for all writes of a step, at each of its own turns; or
    the events that are held back for it are overtaken by later ones."""
    names = [str(number) for number in range(3 * EVENTS_PER_TURN)]
    opened = [streams.open(name) for name in names]
    streams.deliver([Delta(name, 0, [1], "x") for name in names])
    streams.deliver([end(name) for name in names])
    reads = [asyncio.create_task(stream.next()) for stream in opened]
    await settle()
    await settle()
    assert 0 < sum(read.done() for read in reads) <= 2 * EVENTS_PER_TURN
    assert await asyncio.gather(*reads) == [Delta(name, 0, [1], "x") for name in names]
    assert [await stream.next() for stream in opened] == [end(name) for name in names]


async def test_tokens_without_text_are_news(streams: LiveStreams) -> None:
    """A token in the middle of a character has no text, yet clients count tokens."""
    stream = streams.open("a")
    streams.deliver([Delta("a", 0, [1], "")])
    assert await stream.next() == Delta("a", 0, [1], "")


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
    streams.mark_submitted(stream)
    streams.close(stream)
    with pytest.raises(DuplicateRequest):
        streams.open("a")
    streams.deliver([Delta("a", 0, [1], "late"), end("a")])
    await settle()
    again = streams.open("a")
    streams.deliver([Delta("a", 0, [2], "new")])
    assert await again.next() == Delta("a", 0, [2], "new")


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
    streams.mark_submitted(there)
    error = Unavailable("draining")
    streams.refuse(error)
    with pytest.raises(Unavailable, match="draining"):
        streams.open("c")
    with pytest.raises(Unavailable, match="draining"):
        await here.next()
    assert not there.has_ended
    streams.fail_all(error)
    with pytest.raises(Unavailable, match="draining"):
        await there.next()


async def test_siblings_take_turns(streams: LiveStreams) -> None:
    """A sibling's event overtakes another's, or ends the request for all of them."""
    stream = streams.open("a", 3)
    streams.deliver([Delta("a", 2, [1], "x"), Delta("a", 0, [2], "y"), end("a", 2)])
    await settle()
    assert await stream.next() == Delta("a", 2, [1], "x")
    assert await stream.next() == Delta("a", 0, [2], "y")
    assert await stream.next() == end("a", 2)
    assert not stream.has_ended
    streams.deliver([Delta("a", 1, [4], "w"), end("a", 1), end("a", 0)])
    rest = [await stream.next() for _ in range(4)]
    assert rest == [Delta("a", 1, [4], "w"), end("a", 1), end("a", 0), None]
    assert stream.is_complete


async def test_the_whole_is_there_when_all_have_ended(streams: LiveStreams) -> None:
    """An answer in one piece that misses a sibling, or comes before its last token."""
    stream = streams.open("a", 2)
    whole = asyncio.create_task(stream.whole())
    streams.deliver([Delta("a", 1, [1], "x"), end("a", 1)])
    await settle()
    assert not whole.done()
    streams.deliver([Delta("a", 0, [2, 3], "yz"), end("a", 0)])
    assert await whole == [
        (Delta("a", 0, [2, 3], "yz"), end("a", 0)),
        (Delta("a", 1, [1], "x"), end("a", 1)),
    ]


async def test_a_failure_comes_after_what_was_said(streams: LiveStreams) -> None:
    """A sibling's end that had come is lost with the request that failed later."""
    stream = streams.open("a", 2)
    error = Unavailable("the worker is gone")
    streams.deliver([Delta("a", 1, [1], "x"), end("a", 1), Failed("a", error)])
    assert [await stream.next() for _ in range(2)] == [
        Delta("a", 1, [1], "x"),
        end("a", 1),
    ]
    with pytest.raises(Unavailable, match="the worker is gone"):
        await stream.next()
    with pytest.raises(Unavailable, match="the worker is gone"):
        await stream.whole()
    assert not stream.is_complete


async def test_an_abandoned_family_is_live_until_its_last_sibling_ends(
    streams: LiveStreams,
) -> None:
    """The first sibling's end frees the id while others still send."""
    stream = streams.open("a", 2)
    streams.mark_submitted(stream)
    streams.close(stream)
    streams.deliver([end("a", 1), Delta("a", 0, [1], "late")])
    await settle()
    with pytest.raises(DuplicateRequest):
        streams.open("a")
    streams.deliver([end("a", 0)])
    await settle()
    streams.open("a")


async def test_a_result_counts_that_is_there_when_the_request_ends(streams: LiveStreams) -> None:
    """A request that is aborted while the model is known is still checked: a wrong one is refused
    by name, whoever aborts its id at that moment."""
    stream = streams.open("a")

    async def ready() -> str:
        return "model"

    async def never() -> str:
        await asyncio.Event().wait()
        return "unreachable"

    stream.abort()
    assert await stream.unless_ended(ready()) == "model"
    assert await stream.unless_ended(never()) is None
