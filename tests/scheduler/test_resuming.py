"""A resumed answer goes on as if nothing had happened; where it cannot, its client learns why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from protos import inference_pb2 as pb
from scheduler_svc.core.request import FinishReason
from scheduler_svc.engine.events import Submission
from scheduler_svc.errors import RequestRejected
from scheduler_svc.front.served_model import Model
from scheduler_svc.front.validation import validate
from scheduler_svc.text.tokenizer import Tokenizer
from tests.support.asked import END, MODEL
from tests.support.calls import generate, ids, kinds, read_all, started, text_of
from tests.support.edge import Edge
from tests.support.small_tokenizers import byte_level, metaspace

MERGED = byte_level([("Ċ", "Ċ"), ("E", "N"), ("a", "b"), ("ð", "Ł"), ("¬", "â")])
KINDS = {"bytes": MERGED, "pieces": metaspace()}
MODELS = {
    kind: replace(MODEL, tokenizer=Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust)))
    for kind, rust in KINDS.items()
}


def asked(
    tokens: Sequence[int] = (), text_length: int = 0, index: int = 0, **sampling: Any
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokens=pb.TokenIds(ids=[5]),
        sampling=pb.SamplingParams(**sampling),
        resume=pb.Resume(output_token_ids=tokens, text_length=text_length, index=index),
    )


def resumed(request: pb.GenerateRequest, model: Model = MODEL) -> Submission:
    return validate(request, "r", 0, model, 8)


def run(submission: Submission, tokens: Sequence[int]) -> list[str]:
    """The text after each token, as the engine reads them, and the rest; up to a stop string."""
    (text,) = submission.texts
    shown = [submission.unsent_text]
    for token_id in tokens:
        shown.append(text.push(token_id))
        if text.matched_stop is not None:
            return shown
    return [*shown, text.finish()]


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    text=st.text(alphabet="abEND €ก\n👩", min_size=1, max_size=30),
    stops=st.lists(st.text(alphabet="abEND €\n", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 6),
    place=st.integers(0, 40),
    lost=st.integers(0, 3),
)
def test_broken_off_anywhere_the_text_is_the_same(
    kind: str, text: str, stops: list[str], min_tokens: int, place: int, lost: int
) -> None:
    """In mid-character, inside a stop string, with text held back or lost on the way."""
    model = MODELS[kind]
    tokens = KINDS[kind].encode(text, add_special_tokens=False).ids
    fields = {"stop": stops, "min_tokens": min_tokens, "seed": 1}
    whole = resumed(asked(**fields), model)
    shown = run(whole, tokens)
    matched = whole.texts[0].matched_stop
    said = tokens[: len(shown) - 1]  # up to the stop string
    place = min(place, len(said))
    delivered = max(0, len("".join(shown[: place + 1])) - lost)
    again = resumed(asked(said[:place], delivered, **fields), model)
    if again.end is not None:
        assert (again.end.stop_string, place) == (matched, len(said))
        assert "".join(shown)[:delivered] + again.unsent_text == "".join(shown)
        return
    rest = run(again, said[place:])
    assert "".join(shown)[:delivered] + "".join(rest) == "".join(shown)
    assert again.texts[0].matched_stop == matched


@pytest.mark.parametrize(
    ("fields", "unsent", "reason", "stop", "count"),
    [
        ({"tokens": [*ids("ab"), END]}, "ab", FinishReason.STOP, END, 3),
        ({"tokens": [*ids("ab"), END], "text_length": 2}, "", FinishReason.STOP, END, 3),
        ({"tokens": ids("ab"), "max_tokens": 2}, "ab", FinishReason.LENGTH, None, 2),
        ({"tokens": ids("aé")[:2], "max_tokens": 2, "text_length": 1}, "\ufffd",
         FinishReason.LENGTH, None, 2),
        ({"tokens": ids("axy"), "stop": ["xy"], "text_length": 1}, "", FinishReason.STOP, "xy", 3),
        ({"tokens": ids("axy"), "stop": ["xy"], "max_tokens": 3}, "a", FinishReason.STOP, "xy", 3),
        ({"tokens": ids("axy"), "stop": ["xy"], "include_stop_str_in_output": True}, "axy",
         FinishReason.STOP, "xy", 3),
        ({"tokens": [END], "include_stop_str_in_output": True, "skip_special_tokens": False},
         "<|im_end|>", FinishReason.STOP, END, 1),
        ({"tokens": ids("ax"), "stop": ["xy"], "max_tokens": 2, "text_length": 1}, "x",
         FinishReason.LENGTH, None, 2),
    ],
)  # fmt: skip
def test_an_answer_that_has_ended_ends_at_once(
    fields: dict[str, Any], unsent: str, reason: FinishReason, stop: object, count: int
) -> None:
    """Only its end was lost: another token would be one too many."""
    submission = resumed(asked(**fields, seed=1))
    assert submission.unsent_text == unsent
    end = submission.end
    assert end is not None
    assert (end.reason, end.completion_tokens, end.prompt_tokens) == (reason, count, 1)
    assert (end.stop_string or end.stop_token_id) == stop


@pytest.mark.parametrize(
    ("request_", "parts"),
    [
        (asked([300]), ["resume.output_token_ids[0] is 300", "0 to 299"]),
        (asked(index=-1), ["resume.index is -1", "0 to 7"]),
        (asked(index=8), ["resume.index is 8", "0 to 7"]),
        (asked(text_length=-1), ["resume.text_length is -1", "at least 0"]),
        (asked(ids("ab"), 3, seed=1), ["resume.text_length is 3", "at most 2", "these 2 tokens"]),
        (asked(text_length=1), ["resume.text_length is 1", "at most 0", "0 tokens"]),
        (asked(ids("aé")[:2], 2, seed=1), ["resume.text_length is 2", "at most 1"]),
        (asked(ids("ax"), 2, stop=["xy"], seed=1), ["resume.text_length is 2", "at most 1"]),
        (
            asked(ids("abc"), max_tokens=2, seed=1),
            ["resume.output_token_ids is '3 tokens'", "up to 2 (max_tokens)"],
        ),
        (
            asked([END, 5], seed=1),
            [f"resume.output_token_ids[0] is {END}", "no stop token but as the last"],
        ),
        (
            asked([5, END], min_tokens=2, seed=1),
            [f"resume.output_token_ids[1] is {END}", "behind min_tokens"],
        ),
        (
            asked(ids("axyz"), stop=["xy"], seed=1),
            ["resume.output_token_ids is '4 tokens'", "up to 3", "stop string 'xy'"],
        ),
        (asked([5]), ["sampling.seed is None", "the seed of the answer that is resumed"]),
        (asked([5], n=2, seed=1), ["sampling.n is 2", "1, with resume"]),
        (asked(index=1, n=2, seed=1), ["sampling.n is 2", "1, with resume"]),
        (asked([5], beam_width=2, seed=1), ["sampling.beam_width is 2", "1, with resume"]),
        (
            asked([5], max_tokens=0, prompt_logprobs=0, seed=1),
            ["resume.output_token_ids is '1 tokens'", "up to 0 (max_tokens)"],
        ),
    ],
)
def test_what_cannot_be_resumed_is_named(request_: pb.GenerateRequest, parts: list[str]) -> None:
    """Going on from something else would give an answer that nobody asked for."""
    with pytest.raises(RequestRejected) as error:
        resumed(request_)
    for part in parts:
        assert part in str(error.value), str(error.value)


def test_what_the_core_gets() -> None:
    """Tokens count as output, and random numbers depend on the sibling."""
    new = resumed(asked(ids("ab"), 2, index=3, seed=9, prompt_logprobs=1)).new
    assert (new.output_token_ids, new.index, new.prompt_token_ids) == (ids("ab"), 3, [5])
    assert new.prompt_logprobs is None, "they came with the first delta"
    assert resumed(asked(prompt_logprobs=1)).new.prompt_logprobs == 1
    assert resumed(asked(index=1, prompt_logprobs=1)).new.prompt_logprobs is None
    assert resumed(asked(ids("ab"), 2, temperature=0)).new.sampling.temperature == 0


async def test_only_the_rest_is_sent(edge: Edge) -> None:
    """What the client has it must not get twice; usage counts all of the answer."""
    call = generate(
        edge,
        request_id="r",
        sampling=pb.SamplingParams(max_tokens=4, seed=7),
        resume=pb.Resume(output_token_ids=ids("naïv")[:3], text_length=2, index=2),
    )
    assert (await started(call)).seed == 7
    edge.engine.speak("r", ids("naïv")[3:], index=2)
    rest = await read_all(call)
    assert text_of(rest) == "ï"
    assert {response.index for response in rest} == {2}
    assert [token for response in rest for token in response.chunk.token_ids] == ids("naïv")[3:4]
    assert rest[-1].complete.usage.completion_tokens == 4


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_an_end_needs_no_engine(edge: Edge, is_streamed: bool) -> None:
    """And leaves nothing behind that counts as live."""
    call = generate(
        edge,
        request_id="r",
        stream=is_streamed,
        resume=pb.Resume(output_token_ids=[*ids("ab"), END], text_length=1),
        sampling=pb.SamplingParams(seed=7),
    )
    answer = await read_all(call)
    assert kinds(answer) == ["started", "chunk", "complete"]
    assert text_of(answer) == "b"
    assert answer[-1].complete.stop_token_id == END
    assert edge.engine.submitted == []
    assert edge.server.num_live == 0


async def test_an_abort_names_the_sibling(edge: Edge) -> None:
    call = generate(edge, request_id="r", resume=pb.Resume(index=3))
    await started(call)
    await edge.inference.Abort(pb.AbortRequest(request_ids=["r"]))
    end = (await read_all(call))[-1]
    assert (end.index, end.complete.finish_reason) == (3, "abort")
