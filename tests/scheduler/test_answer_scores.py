"""Log probabilities go with their tokens, however these are merged, held back or cut off."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.core.request import FinishReason, Request, Sampling, TokenScore
from scheduler_svc.engine.answers import Answers
from scheduler_svc.engine.events import Delta, Finished
from tests.support.engine_harness import Letters

PROMPT = [9, 8, 7]
PROMPT_SCORES = [TokenScore(8, -1.0, 2), TokenScore(7, -2.0, 3)]


class Scored:
    """Answers whose tokens and scores the test makes; ten messages a second, two at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("scheduler_svc.engine.answers.MESSAGES_PER_SECOND", 10)
        monkeypatch.setattr("scheduler_svc.engine.answers.MAX_BURST", 2)
        self.now = 0.0
        self.answers = Answers(lambda: self.now)
        self.last: Delta | None = None  # taken before the next step

    def begin(self, stop: str = "", resumed: list[int] | None = None, **how: Any) -> Request:
        resumed = resumed or []
        request = Request("r", 0, [*PROMPT, *resumed], 3, 100, Sampling(logprobs=0))
        self.answers.add(request, Letters(stop), **how)  # type: ignore[arg-type]
        return request

    def step(self, request: Request, *tokens: int, seconds: float = 0.0) -> list[Any]:
        self.now += seconds
        if self.last is not None:
            self.last.is_taken = True
        request.token_ids.extend(tokens)
        request.scores.extend(TokenScore(token, -float(token), 1) for token in tokens)
        ended = [request] if request.finish_reason is not None else []
        self.answers.note_sampled([request] if tokens else [], ended)
        self.answers.make_text(lambda _: None)
        events = self.answers.take_events()
        for delta in (event for event in events if isinstance(event, Delta)):
            assert [score.token_id for score in delta.logprobs] == delta.token_ids
            self.last = delta
        return list(events)


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> Scored:
    return Scored(monkeypatch)


def test_each_delta_has_the_scores_of_its_tokens(scored: Scored) -> None:
    """A client that shows probabilities beside words would show those of others."""
    request = scored.begin()
    (first,) = scored.step(request, 0)
    assert first.logprobs == [TokenScore(0, 0.0, 1)]
    scored.step(request, 1)
    assert scored.step(request, 2) == [], "held back by the rate"
    (merged,) = scored.step(request, 3, 4, seconds=1)
    assert merged.token_ids == [2, 3, 4]
    request.finish_reason = FinishReason.LENGTH
    last, end = scored.step(request, 5, 6)
    assert last.token_ids == [5, 6]
    assert end.completion_tokens == 7


def test_scores_behind_a_stop_string_are_dropped(scored: Scored) -> None:
    """They belong to tokens that the answer does not have."""
    request = scored.begin(stop="c")
    (first,) = scored.step(request, 1)
    request.finish_reason = FinishReason.LENGTH
    last, end = scored.step(request, 2, 3)
    assert (first.token_ids, last.token_ids) == ([1], [2])
    assert end.stop_string == "c"


def test_a_resumed_answer_has_scores_of_new_tokens_only(scored: Scored) -> None:
    """The core has none for the tokens that came with the request."""
    request = scored.begin(resumed=[1, 2], unsent_text="c")
    (first,) = scored.step(request, 3)
    assert (first.token_ids, first.text) == ([3], "cd")
    request.finish_reason = FinishReason.LENGTH
    *_, end = scored.step(request, 4)
    assert end.completion_tokens == 4, "usage counts the whole answer"


def test_the_prompts_scores_come_once_with_the_first_delta(scored: Scored) -> None:
    """Twice, they double a client's list; later, it shows text without them."""
    request = scored.begin()
    request.prompt_scores += PROMPT_SCORES
    (first,) = scored.step(request, 0)
    assert (first.token_ids, first.prompt_logprobs) == ([0], PROMPT_SCORES)
    (second,) = scored.step(request, 1)
    assert not second.prompt_logprobs


def test_a_request_that_only_scores_has_one_delta(scored: Scored) -> None:
    """No token is sampled, and the answer ends all the same."""
    request = scored.begin()
    request.prompt_scores += PROMPT_SCORES
    request.finish_reason = FinishReason.LENGTH
    delta, end = scored.step(request)
    assert delta == Delta("r", 0, [], "", (), PROMPT_SCORES)
    assert isinstance(end, Finished)
    assert (end.reason, end.completion_tokens, end.prompt_tokens) == (FinishReason.LENGTH, 0, 3)


def test_an_answer_in_one_piece_has_all_scores(scored: Scored) -> None:
    request = scored.begin(is_streamed=False)
    request.prompt_scores += PROMPT_SCORES
    assert scored.step(request, 0, 1) == []
    request.finish_reason = FinishReason.LENGTH
    delta, _ = scored.step(request, 2)
    assert (delta.token_ids, delta.prompt_logprobs) == ([0, 1, 2], PROMPT_SCORES)


def test_an_abort_amid_the_prompt_tells_no_part_of_its_scores(scored: Scored) -> None:
    """Scores with a gap cannot be told from scores of a shorter prompt."""
    request = scored.begin()
    request.prompt_scores += PROMPT_SCORES[:1]
    request.finish_reason = FinishReason.ABORT
    (end,) = scored.step(request)
    assert isinstance(end, Finished)
