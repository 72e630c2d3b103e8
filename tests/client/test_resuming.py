"""A stream that is lost at any point ends as if nothing had happened."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import client
from client import Answer, AsyncChairlift, Chairlift
from client.resuming import MAX_PAUSE_SECONDS, Course
from protos import inference_pb2
from tests.support.fake_server import MODEL, FakeEngine, start

# prompt, options, responses of the undisturbed call (Started and every Complete included)
STORIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "one": ("count 3", {}, 5),
    "mid-character": ("spell é😀x", {}, 9),
    "logprobs": ("count 2", {"logprobs": 1, "prompt_logprobs": 1}, 4),
    "siblings": ("uneven 1", {"n": 3}, 10),
    "beams": ("rank 2", {"n": 2, "beam_width": 2}, 5),
}
BREAKS = [
    pytest.param(name, place, id=f"{name}-{place}")
    for name, (_, _, count) in STORIES.items()
    for place in range(count + 1)
]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client.resuming.FIRST_PAUSE_SECONDS", 0.001)


def without_ids(answers: list[Answer]) -> list[tuple[Any, ...]]:
    """What must be equal: all but the ids, which the server may choose anew."""
    return [
        (a.text, a.token_ids, a.completion, a.logprobs, a.prompt_logprobs, a.started.seed)
        for a in answers
    ]


@pytest.mark.parametrize(("story", "place"), BREAKS)
def test_a_stream_lost_anywhere_is_whole(
    chairlift: Chairlift, engine: FakeEngine, story: str, place: int
) -> None:
    """Before Started, between deltas, within a character, after the last token, after the end."""
    prompt, options, count = STORIES[story]
    undisturbed = chairlift.generate(prompt, **options).answers()
    calls = len(engine.requests)
    engine.losses = [place]
    stream = chairlift.generate(prompt, **options)
    texts: dict[int, str] = {}
    for delta in stream:
        texts[delta.index] = texts.get(delta.index, "") + delta.text
    assert without_ids(stream.answers()) == without_ids(undisturbed)
    assert texts == {answer.completion.index: answer.text for answer in undisturbed}
    assert (len(engine.requests) > calls + 1) == (place < count), "it was not lost"


@pytest.mark.parametrize("story", STORIES)
async def test_the_same_with_asyncio_and_many_losses(
    address: str, engine: FakeEngine, story: str
) -> None:
    """Each call in turn lost a little later, siblings too, while they are read side by side."""
    prompt, options, _ = STORIES[story]
    async with AsyncChairlift(address) as chairlift:
        undisturbed = await chairlift.generate(prompt, **options).answers()
        engine.losses = [0, 1, 2, 2, 1, 3, 2, 1, 2]
        stream = chairlift.generate(prompt, **options)
        assert without_ids(await stream.answers()) == without_ids(undisturbed)
    assert engine.losses == [] or story in ("one", "logprobs", "beams")


def test_what_the_server_is_asked(chairlift: Chairlift, engine: FakeEngine) -> None:
    """The same request, the seed that was drawn, and what has arrived."""
    engine.losses = [3]
    options: dict[str, Any] = {"max_tokens": 9, "stop": "x", "prompt_logprobs": 1}
    stream = chairlift.generate("count 4", request_id="mine", cache_salt="s", priority=2, **options)
    assert stream.text() == "w0 w1 w2 w3 "
    first, second = engine.requests
    assert list(second.resume.output_token_ids) == [0, 1]
    assert (second.resume.text_length, second.resume.index) == (6, 0)
    assert (first.sampling.HasField("seed"), second.sampling.seed) == (False, 7)
    assert not second.sampling.HasField("prompt_logprobs"), "it would be computed twice"
    second.ClearField("resume")
    second.sampling.ClearField("seed")
    second.sampling.prompt_logprobs = 1
    assert second == first


def test_siblings_go_on_one_by_one(chairlift: Chairlift, engine: FakeEngine) -> None:
    """A sibling that has finished is not asked for again."""
    engine.losses = [6]  # Started, w0 of three, w1 of the second, and the first's end
    stream = chairlift.generate("uneven 1", n=3, request_id="mine")
    assert [answer.text for answer in stream.answers()] == [
        "w0 ",
        "(1)w0 (1)w1 ",
        "(2)w0 (2)w1 (2)w2 ",
    ]
    asked = sorted(
        (again.request_id, again.resume.index, again.sampling.HasField("n"))
        for again in engine.requests[1:]
    )
    assert asked == [("mine.1", 1, False), ("mine.2", 2, False)]


def test_resumed_siblings_are_read_side_by_side(chairlift: Chairlift, engine: FakeEngine) -> None:
    """One that never says anything more must not hold up the others' texts."""
    engine.losses = [3, None, None]
    stream = chairlift.generate("forever", n=2)
    indices = [next(stream).index for _ in range(40)]
    stream.cancel()
    assert set(indices[20:]) == {0, 1}


@pytest.mark.parametrize("is_whole", [False, True])
def test_retries_before_anything_came(
    chairlift: Chairlift, engine: FakeEngine, is_whole: bool
) -> None:
    """As an ordinary call: nothing to resume, and no seed that is not the caller's."""
    engine.losses = [0, 0, 1]
    if is_whole:
        assert chairlift.complete("count 2").text == "w0 w1 "
    else:
        assert chairlift.generate("count 2").text() == "w0 w1 "
    assert len(engine.requests) == 4
    assert not any(request.HasField("resume") for request in engine.requests)
    seeds = [request.sampling.HasField("seed") for request in engine.requests]
    assert seeds == [False, False, False, True]


@pytest.mark.parametrize("place", [0, 2])
def test_retries_end(chairlift: Chairlift, engine: FakeEngine, place: int) -> None:
    """A server that stays away is an error, with its own sentence; 0 retries: at once."""
    engine.losses = [place, 0, 0, 0]
    with pytest.raises(client.Unavailable, match=r"^the server is restarting$"):
        chairlift.generate("count 2", retries=2).text()
    assert len(engine.requests) == 3
    engine.losses = [place]
    stream = chairlift.generate("count 2", retries=0)
    for _ in range(2):  # an answer that is not whole stays an error
        with pytest.raises(client.Unavailable):
            stream.text()
    assert len(engine.requests) == 4
    with pytest.raises(ValueError, match="retries is -1; allowed: at least 0"):
        chairlift.generate("count 2", retries=-1)


def test_progress_begins_the_count_anew(chairlift: Chairlift, engine: FakeEngine) -> None:
    """Many losses over a long answer are no reason to give up; many in a row are."""
    engine.losses = [2] * 5
    assert chairlift.generate("count 6", retries=1).text() == "".join(f"w{i} " for i in range(6))


@pytest.mark.parametrize("status", ["INTERNAL", "INVALID_ARGUMENT", "ALREADY_EXISTS", "CANCELLED"])
@pytest.mark.parametrize("place", [0, 2])
def test_other_errors_are_not_tried_again(
    chairlift: Chairlift, engine: FakeEngine, status: str, place: int
) -> None:
    """They would fail again, and a request that breaks the server must not break it ten times."""
    engine.losses, engine.loss = [place], f"{status} no"
    if status == "ALREADY_EXISTS" and place:
        return  # no server says so in the middle of an answer
    with pytest.raises(client.ChairliftError, match=r"^no$"):
        chairlift.generate("count 3").text()
    assert len(engine.requests) == 1


def test_a_full_queue_is_asked_again_later(engine: FakeEngine, chairlift: Chairlift) -> None:
    """After the time that the server advises, and no more often than asked to."""
    engine.losses, engine.loss = [0], "RESOURCE_EXHAUSTED 9 wait"
    course = Course(inference_pb2.GenerateRequest(), retries=1, deadline=None, jitter=lambda: 0.0)
    error = client.QueueFull("9 wait", None)  # type: ignore[arg-type]
    error.retry_seconds = 2.5
    leg = course.first()
    seconds, (again,) = course.after(leg, error, now=0.0)
    assert 2.5 <= seconds <= 2.6
    with pytest.raises(client.QueueFull):
        course.after(again, error, now=0.0)
    with pytest.raises(client.QueueFull):
        chairlift.generate("count 1", retries=0).text()


def test_pauses_grow_up_to_a_limit() -> None:
    """A server that comes back must not meet all its clients in the same moment."""
    course = Course(inference_pb2.GenerateRequest(), retries=99, deadline=None, jitter=lambda: 0.5)
    leg, pauses = course.first(), []
    for _ in range(20):
        seconds, (leg,) = course.after(leg, client.Unavailable("", None), now=0.0)  # type: ignore[arg-type]
        pauses.append(seconds)
    assert pauses == sorted(pauses)
    assert pauses[0] < pauses[3] < pauses[-1] <= MAX_PAUSE_SECONDS


def test_an_own_id_that_is_still_live(chairlift: Chairlift, engine: FakeEngine) -> None:
    """The server has not noticed the loss yet: asked again a few times, then under a new id."""
    engine.losses = [2]
    stream = chairlift.generate("count 3", request_id="mine")
    next(stream)
    engine.live.add("mine")
    assert stream.text() == "w0 w1 w2 "
    ids = [request.request_id for request in engine.requests]
    assert ids == ["mine"] * (len(ids) - 1) + [""]
    assert 3 <= len(ids) <= 6
    assert stream.started is not None
    assert stream.started.request_id.startswith("made-"), "the id to abort it by"


def test_an_id_of_somebody_else(chairlift: Chairlift, engine: FakeEngine) -> None:
    """Before anything has come, the caller's id is the caller's affair."""
    engine.live.add("mine")
    with pytest.raises(client.DuplicateRequest):
        chairlift.generate("count 3", request_id="mine").text()
    assert len(engine.requests) == 1


def test_the_deadline_covers_all_calls(chairlift: Chairlift, engine: FakeEngine) -> None:
    """A timeout that began anew with each call would never pass."""
    engine.losses = [1] + [0] * 99
    with pytest.raises(client.DeadlineExceeded, match="the timeout passed before the answer"):
        chairlift.generate("count 3", retries=99, timeout=0.5).text()
    first, *_, last = [left for left in engine.timeouts if left is not None]
    assert last < first


def test_a_server_that_returns_with_another_model(
    address: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second half of an answer by another model would be no answer of either."""
    engine.losses = [2]
    with Chairlift(address) as chairlift:
        stream = chairlift.generate("count 3")
        next(stream)
        monkeypatch.setattr("tests.support.fake_server.MODEL", "other")
        with pytest.raises(client.ServerError, match=f"begun by the model '{MODEL}'.*runs 'other'"):
            stream.text()


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Restarted:
    """A server on one port that ends in the middle of its answers and comes back."""

    def __init__(self, port: int) -> None:
        self.engine = FakeEngine()
        self._port = port
        self._server, self.address = start(self.engine, port)

    def restart(self) -> None:
        self._server.stop(grace=None).wait()
        self._server, _ = start(self.engine, self._port)

    def stop(self) -> None:
        self._server.stop(grace=None).wait()


@pytest.fixture
def restarted(port: int) -> Iterator[Restarted]:
    server = Restarted(port)
    yield server
    server.stop()


def test_a_connection_that_breaks(restarted: Restarted) -> None:
    """Not a status by a handler, but what gRPC says when the server has gone."""
    with Chairlift(restarted.address, retries=30) as chairlift:
        stream = chairlift.generate("forever", n=1)
        assert next(stream).text == "once"
        restarted.restart()
        assert next(stream).text
        stream.cancel()
    assert restarted.engine.requests[-1].HasField("resume")


async def test_cancelling_ends_a_pause(address: str, engine: FakeEngine) -> None:
    """A stop button must not wait for a server that is away."""
    engine.losses = [0] * 9
    async with AsyncChairlift(address) as chairlift:
        stream = chairlift.generate("count 1")
        stream._calls.pause = lambda seconds: type(stream._calls).pause(stream._calls, 60)  # type: ignore[method-assign]
        task = asyncio.ensure_future(stream.text())
        await asyncio.sleep(0.2)
        stream.cancel()
        assert await asyncio.wait_for(task, 10) == ""
    with Chairlift(address) as blocking:
        other = blocking.generate("count 1")
        other._calls.pause = lambda seconds: type(other._calls).pause(other._calls, 60)  # type: ignore[method-assign]
        timer = threading.Timer(0.2, other.cancel)
        timer.start()
        assert await asyncio.to_thread(other.text) == ""
        timer.join()
