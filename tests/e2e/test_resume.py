"""Resumed answers and scores over the whole service: tokens, text, log probabilities, usage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.support.processes import Server

PROMPT = "Once upon a time, é"


@pytest.fixture(scope="module")
def stub(tiny_server: Server) -> Iterator[Any]:
    with grpc.insecure_channel(tiny_server.address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


class Answer:
    """All that came of one sibling."""

    def __init__(self, responses: list[pb.GenerateResponse], index: int) -> None:
        chunks = [r.chunk for r in responses if r.index == index and r.HasField("chunk")]
        (self.end,) = [r.complete for r in responses if r.index == index and r.HasField("complete")]
        self.tokens = [token for chunk in chunks for token in chunk.token_ids]
        self.text = "".join(chunk.text for chunk in chunks)
        self.logprobs = [score for chunk in chunks for score in chunk.logprobs]
        self.prompt_logprobs = [score for chunk in chunks for score in chunk.prompt_logprobs]

    @property
    def ended(self) -> tuple[str, str, int, int]:
        usage = self.end.usage
        return (
            self.end.finish_reason,
            self.end.stop_string,
            usage.prompt_tokens,
            usage.completion_tokens,
        )


def ask(stub: Any, index: int = 0, **fields: Any) -> Answer:
    request = pb.GenerateRequest(text=PROMPT, **fields)
    return Answer(list(stub.Generate(request, timeout=60)), index)


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 5},
    "penalties": {"seed": 6, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
    "log probabilities": {"seed": 7, "logprobs": 2},
    "bans": {"seed": 8, "bad_words": ["a", "bc"], "logit_bias": {65: 5.0}, "min_tokens": 12},
    "drafts": {"temperature": 0, "speculate": 4},
}


@pytest.mark.parametrize("case", CASES)
def test_an_answer_goes_on_wherever_it_was_lost(stub: Any, case: str) -> None:
    """A client that lost its stream gets exactly what it would have got."""
    fields = {"max_tokens": 16, **CASES[case]}
    whole = ask(stub, sampling=pb.SamplingParams(**fields))
    for place in (1, 2, 7, 15, 16):
        has = whole.tokens[:place]
        if len(has) < place:
            break
        rest = ask(
            stub,
            sampling=pb.SamplingParams(**fields),
            resume=pb.Resume(output_token_ids=has, text_length=0),
        )
        assert has + rest.tokens == whole.tokens
        assert rest.text == whole.text
        assert rest.ended == whole.ended
        assert len(rest.logprobs) == len(whole.logprobs[place:])
        for ours, theirs in zip(rest.logprobs, whole.logprobs[place:], strict=True):
            assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_each_sibling_is_resumed_for_itself(stub: Any) -> None:
    """Its random numbers are those of its index."""
    fields = {"max_tokens": 12, "seed": 9}
    request = pb.GenerateRequest(text=PROMPT, sampling=pb.SamplingParams(n=3, **fields))
    responses = list(stub.Generate(request, timeout=60))
    for index in range(3):
        whole = Answer(responses, index)
        rest = ask(
            stub,
            index,
            sampling=pb.SamplingParams(**fields),
            resume=pb.Resume(output_token_ids=whole.tokens[:5], index=index),
        )
        assert whole.tokens[:5] + rest.tokens == whole.tokens
        assert rest.ended == whole.ended


def test_a_stop_string_over_the_break(stub: Any) -> None:
    """Begun before it, and complete behind it."""
    letters = {65 + place: 12.0 for place in range(26)}  # ids of small letters: a byte each
    fields: dict[str, Any] = {"max_tokens": 24, "seed": 3, "logit_bias": letters}
    free = ask(stub, sampling=pb.SamplingParams(**fields))
    stop = free.text[8:11]
    assert len(stop) == 3
    fields["stop"] = [stop]
    whole = ask(stub, sampling=pb.SamplingParams(**fields))
    assert whole.ended[:2] == ("stop", stop)
    for place in range(len(whole.tokens) - 3, len(whole.tokens)):
        rest = ask(
            stub,
            sampling=pb.SamplingParams(**fields),
            resume=pb.Resume(output_token_ids=whole.tokens[:place], text_length=2),
        )
        assert whole.tokens[:place] + rest.tokens == whole.tokens
        assert whole.text[:2] + rest.text == whole.text
        assert rest.ended == whole.ended


@pytest.mark.parametrize("is_streamed", [True, False])
def test_the_prompt_is_scored_once_for_all_siblings(stub: Any, is_streamed: bool) -> None:
    """Also on a prefix hit, where its KV is there already and its logits are not."""
    sampling = pb.SamplingParams(n=2, max_tokens=4, seed=4, prompt_logprobs=1, logprobs=0)
    request = pb.GenerateRequest(text=PROMPT * 4, sampling=sampling, stream=is_streamed)
    answers = [list(stub.Generate(request, timeout=60)) for _ in range(2)]
    for responses in answers:
        first, second = Answer(responses, 0), Answer(responses, 1)
        assert len(first.prompt_logprobs) == first.ended[2] - 1
        assert second.prompt_logprobs == []
        assert [score.token_id for score in second.logprobs] == second.tokens
    before, after = (Answer(responses, 0).prompt_logprobs for responses in answers)
    for one, other in zip(before, after, strict=True):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_scoring_an_answer_gives_what_was_said_of_it(stub: Any) -> None:
    """prompt_logprobs of prompt and answer together: those of the answer, to 1e-4."""
    said = ask(stub, sampling=pb.SamplingParams(max_tokens=10, seed=4, logprobs=3, ignore_eos=True))
    prompt = stub.Tokenize(pb.TokenizeRequest(text=PROMPT)).token_ids
    scored = pb.GenerateRequest(
        tokens=pb.TokenIds(ids=[*prompt, *said.tokens]),
        sampling=pb.SamplingParams(max_tokens=0, prompt_logprobs=3),
    )
    answer = Answer(list(stub.Generate(scored, timeout=60)), 0)
    assert answer.ended == ("length", "", len(prompt) + 10, 0)
    assert len(answer.prompt_logprobs) == len(prompt) + 9
    for ours, theirs in zip(answer.prompt_logprobs[-10:], said.logprobs, strict=True):
        assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [c.token_id for c in ours.top] == [c.token_id for c in theirs.top]
