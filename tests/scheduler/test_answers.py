"""What is told of answers, and when: few messages for many, and nothing lost with those."""

from __future__ import annotations

import pytest

from scheduler_svc.core.request import FinishReason, Request, Sampling
from scheduler_svc.engine.answers import Answers
from scheduler_svc.engine.events import Delta, Failed, Finished
from scheduler_svc.errors import RequestFailed
from tests.support.engine_harness import Bench, Letters, right


class Told:
    """Answers whose clock and tokens the test makes; ten messages a second, two at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("scheduler_svc.engine.answers.MESSAGES_PER_SECOND", 10)
        monkeypatch.setattr("scheduler_svc.engine.answers.MAX_BURST", 2)
        self.now = 0.0
        self.answers = Answers(lambda: self.now)
        self.finished: list[Request] = []

    def begin(self, name: str, stop: str = "", index: int = 0, is_streamed: bool = True) -> Request:
        request = Request(name, 0, [9], 1, 100, Sampling(), index=index)
        self.answers.add(request, Letters(stop), is_streamed)  # type: ignore[arg-type]
        return request

    def step(
        self,
        *requests: Request,
        token: int = 0,
        seconds: float = 0.0,
        are_taken: bool = True,
    ) -> list[object]:
        """A token for each of these; what is told then, and whether its streams take it."""
        self.now += seconds
        for request in requests:
            request.token_ids.append(token)
        ended = [request for request in requests if request.finish_reason is not None]
        self.answers.note_sampled(list(requests), ended)
        self.answers.make_text(self.finished.append)
        events = self.answers.take_events()
        for event in events:
            if isinstance(event, Delta):
                event.is_taken = are_taken
        return list(events)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


def test_many_answers_get_bigger_portions(told: Told) -> None:
    """A message per token for each of hundreds of clients: all of them fall behind."""
    requests = [told.begin(name) for name in "abcd"]
    first = [Delta(name, 0, [0], "a") for name in "abcd"]
    assert told.step(*requests) == first, "a first token does not wait"
    assert told.step(*requests, token=1) == []
    assert told.answers.is_behind
    # two messages short, then as many as time allows
    assert told.step(*requests, token=2, seconds=0.3) == [Delta("a", 0, [1, 2], "bc")]
    assert told.step(*requests, token=3, seconds=0.2) == [
        Delta("b", 0, [1, 2, 3], "bcd"),
        Delta("c", 0, [1, 2, 3], "bcd"),
    ]
    assert told.step(seconds=100) == [Delta("d", 0, [1, 2, 3], "bcd"), Delta("a", 0, [3], "d")]
    assert not told.answers.is_behind


def test_an_end_does_not_wait(told: Told) -> None:
    """The last tokens of an answer come late, or not at all."""
    request, other = told.begin("a"), told.begin("b")
    told.step(request, other)
    told.step(request, other, token=1)
    request.finish_reason = FinishReason.LENGTH
    delta, end = told.step(request, other, token=2)
    assert delta == Delta("a", 0, [1, 2], "bc")
    assert isinstance(end, Finished)
    assert end.completion_tokens == 3
    assert told.step(seconds=1) == [Delta("b", 0, [1, 2], "bc")], "who ended waits no more"


def test_a_stop_string_is_found_before_it_is_told(told: Told) -> None:
    """A request computes on until it is its turn to be told of, and its text goes on too."""
    request, other = told.begin("a", stop="c"), told.begin("b")
    told.step(request, other)
    told.step(request, other, token=1)
    delta, end = told.step(request, request, token=2)
    assert told.finished == [request]
    assert delta == Delta("a", 0, [1, 2], "b"), "the token behind the stop string is told"
    assert isinstance(end, Finished)
    assert (end.stop_string, end.completion_tokens) == ("c", 3)


def test_a_failure_comes_behind_all_that_was_said(told: Told) -> None:
    """Tokens that a client could have had are lost with the request."""
    request = told.begin("a")
    for token in range(4):
        told.step(request, token=token)
    request.token_ids.append(4)
    told.answers.note_sampled([request], [])
    told.answers.fail("a", RequestFailed("a: out of luck"))
    delta, failed = told.step()
    assert delta == Delta("a", 0, [2, 3, 4], "cde")
    assert isinstance(failed, Failed)


def test_the_rest_is_told_without_another_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a step takes long, or none follows, tokens that have come are kept from clients."""
    monkeypatch.setattr("scheduler_svc.engine.answers.MESSAGES_PER_SECOND", 10)
    monkeypatch.setattr("scheduler_svc.engine.answers.MAX_BURST", 1)
    bench = Bench()
    bench.connect()
    for name in "abc":
        bench.submit(name, [1, 2], 8)
    bench.step(4)
    behind = [name for name in "abc" if len(bench.tokens(name)) < 4]
    assert behind
    for _ in range(8):
        bench.now += 0.1
        bench.turn()
    assert [bench.tokens(name) for name in "abc"] == [right([1, 2], 8)[:4]] * 3


def test_a_slow_reader_finds_one_merged_delta(told: Told) -> None:
    """A delta per token for a reader that does not read fills the memory; or merging mixes its
    siblings, or lets the one that is read wait for the other."""
    slow, fast = told.begin("a"), told.begin("a", index=1)
    (first, other) = told.step(slow, fast, are_taken=False)
    assert isinstance(first, Delta)
    assert isinstance(other, Delta)
    other.is_taken = True
    for token in range(1, 4):
        letter = "abcd"[token]
        assert told.step(slow, fast, token=token, seconds=1) == [Delta("a", 1, [token], letter)]
    assert not told.answers.is_behind, "nobody waits for the clock"
    first.is_taken = True
    assert told.step(seconds=1) == [Delta("a", 0, [1, 2, 3], "bcd")]


def test_an_end_does_not_wait_for_a_slow_reader(told: Told) -> None:
    """A client that disconnects without a word would hold an answer for ever."""
    request = told.begin("a")
    told.step(request, are_taken=False)
    told.step(request, token=1)
    request.finish_reason = FinishReason.LENGTH
    delta, end = told.step(request, token=2, seconds=1)
    assert delta == Delta("a", 0, [1, 2], "bc")
    assert isinstance(end, Finished)


def test_an_answer_in_one_piece_is_told_at_its_end(told: Told) -> None:
    """Deltas that nobody reads before the end take the place of those for others."""
    whole, other = told.begin("a", is_streamed=False), told.begin("b")
    assert told.step(whole, other) == [Delta("b", 0, [0], "a")]
    assert told.step(whole, other, token=1, seconds=1) == [Delta("b", 0, [1], "b")]
    whole.finish_reason = FinishReason.LENGTH
    delta, end = told.step(whole, token=2, seconds=1)
    assert delta == Delta("a", 0, [0, 1, 2], "abc")
    assert isinstance(end, Finished)
