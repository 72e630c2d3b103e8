"""Events as messages: log probabilities stay with their tokens, however many there are."""

from __future__ import annotations

import pytest

from protos import inference_pb2 as pb
from scheduler_svc.core.request import FinishReason, TokenScore
from scheduler_svc.engine.events import Delta, Finished
from scheduler_svc.front import responses
from scheduler_svc.front.responses import responses as messages_of

GRPC_DEFAULT_BYTES = 4 << 20  # that a client takes


def scores(*sizes: int, first: int = 0) -> list[TokenScore]:
    """Scores with so many candidates each."""
    return [
        TokenScore(first + place, -place / 4, 1, tuple((c, -c / 2) for c in range(size)))
        for place, size in enumerate(sizes)
    ]


def chunks(delta: Delta) -> list[pb.Chunk]:
    made = list(messages_of(delta))
    assert {message.index for message in made} == {delta.index}
    return [message.chunk for message in made]


def test_a_delta_is_one_message() -> None:
    """And one without log probabilities says nothing of them."""
    assert chunks(Delta("r", 2, [5, 6], "ab")) == [pb.Chunk(text="ab", token_ids=[5, 6])]
    assert chunks(Delta("r", 0, [], "")) == [pb.Chunk()], "of an empty answer in one piece"
    (chunk,) = chunks(Delta("r", 1, [5, 6], "ab", scores(0, 2, first=5)))
    assert chunk == pb.Chunk(
        text="ab",
        token_ids=[5, 6],
        logprobs=[
            pb.TokenLogprobs(token_id=5, logprob=0, rank=1),
            pb.TokenLogprobs(
                token_id=6,
                logprob=-0.25,
                rank=1,
                top=[pb.Candidate(token_id=0, logprob=0), pb.Candidate(token_id=1, logprob=-0.5)],
            ),
        ],
    )


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 100])
def test_many_log_probabilities_come_in_several_messages(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """One message may not hold them; put together, nothing is lost or doubled."""
    monkeypatch.setattr(responses, "MAX_SCORES", limit)
    delta = Delta("r", 0, [0, 1, 2, 3], "abcd", scores(1, 0, 3, 1), scores(2, 2, 0, first=7))
    made = chunks(delta)
    for chunk in made:
        for field in (chunk.logprobs, chunk.prompt_logprobs):
            assert len(field) <= 1 or sum(1 + len(score.top) for score in field) <= limit
        assert len(chunk.logprobs) == len(chunk.token_ids)
    assert [token for chunk in made for token in chunk.token_ids] == delta.token_ids
    found = [score.token_id for chunk in made for score in chunk.logprobs]
    assert found == [0, 1, 2, 3]
    assert [len(score.top) for chunk in made for score in chunk.prompt_logprobs] == [2, 2, 0]
    with_tokens = [bool(chunk.token_ids) for chunk in made]
    assert with_tokens == sorted(with_tokens), "the prompt's come first"
    assert [chunk.text for chunk in made] == [""] * (len(made) - 1) + ["abcd"]


def test_no_message_is_too_big_for_a_client() -> None:
    """gRPC would end the stream with RESOURCE_EXHAUSTED."""
    wide = tuple((299_000 + place, -12.345) for place in range(128))
    prompt = [TokenScore(299_999, -12.345, 299_999, wide)] * 2000
    sizes = [message.ByteSize() for message in messages_of(Delta("r", 0, [], "", (), prompt))]
    assert len(sizes) > 1
    assert max(sizes) < GRPC_DEFAULT_BYTES // 4


def test_a_prompt_that_is_only_scored_has_no_empty_chunk() -> None:
    """One that follows would look like a token."""
    (chunk,) = chunks(Delta("r", 0, [], "", (), scores(1, 1)))
    assert len(chunk.prompt_logprobs) == 2


def test_usage_has_what_was_drafted_and_a_beam_its_score() -> None:
    """Counts that the engine keeps and no client sees are worth nothing."""
    end = Finished("r", 0, FinishReason.STOP, drafted_tokens=9, accepted_tokens=7, beam_score=-0.5)
    (message,) = messages_of(end)
    usage = message.complete.usage
    assert (usage.drafted_tokens, usage.accepted_tokens) == (9, 7)
    assert message.complete.beam_score == -0.5
    (message,) = messages_of(Finished("r", 0, FinishReason.LENGTH))
    assert not message.complete.HasField("beam_score")
