"""chairlift.v1.Inference over a real connection, with a fake engine behind it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from protos import inference_pb2 as pb
from scheduler_svc.core.request import FinishReason
from scheduler_svc.errors import QueueFull, RequestFailed
from scheduler_svc.front.inference_service import _default_sampling
from scheduler_svc.front.statuses import DETAILS_KEY
from scheduler_svc.settings.config import Config
from scheduler_svc.text.tokenizer import Tokenizer
from tests.support.asked import MODEL
from tests.support.calls import (
    BYTES,
    END,
    generate,
    ids,
    kinds,
    read_all,
    says,
    started,
    status_of,
    text_of,
    until,
)
from tests.support.edge import Edge, stop
from tests.support.fake_engine import FACTS, FakeEngine
from tests.support.small_tokenizers import chat


async def test_a_stream_is_started_chunks_complete(edge: Edge) -> None:
    """The shape that every client relies on."""
    call = generate(edge, request_id="r", sampling=pb.SamplingParams(max_tokens=4, seed=7))
    first = await started(call)
    assert (first.request_id, first.seed) == ("r", 7)
    assert first.model == "smollm2-135m-instruct"
    edge.engine.speak("r", ids("naïv")[:1])
    assert (await call.read()).chunk == pb.Chunk(text="n", token_ids=ids("n"))
    edge.engine.speak("r", ids("aïv")[:3])
    rest = await read_all(call)
    assert text_of(rest) == "aï"
    complete = rest[-1].complete
    assert complete.finish_reason == "length"
    assert complete.WhichOneof("matched_stop") is None
    assert complete.usage == pb.Usage(prompt_tokens=5, completion_tokens=4)
    assert (complete.timing.queued_seconds, complete.timing.decode_seconds) == (0.25, 1.0)


@pytest.mark.parametrize("is_included", [False, True])
async def test_joined_deltas_equal_the_unary_text(edge: Edge, is_included: bool) -> None:
    """Two ways to ask must not give two answers."""
    edge.engine.script = says("the ďábel 👩‍👩‍👧 ENEND and more")
    sampling = pb.SamplingParams(stop=["END"], include_stop_str_in_output=is_included)
    streamed = await read_all(generate(edge, sampling=sampling))
    whole = await read_all(generate(edge, sampling=sampling, stream=False))
    assert kinds(whole) == ["started", "chunk", "complete"]
    assert text_of(streamed) == text_of(whole)
    assert text_of(whole) == "the ďábel 👩‍👩‍👧 EN" + ("END" if is_included else "")
    tokens = [token for response in streamed for token in response.chunk.token_ids]
    assert tokens == list(whole[1].chunk.token_ids)
    assert whole[2].complete.stop_string == streamed[-1].complete.stop_string == "END"


async def test_matched_stop_tells_tokens_from_strings(edge: Edge) -> None:
    """Clients that parse tool calls must know which stop it was."""
    edge.engine.script = lambda engine, submission: engine.speak(
        submission.new.request_id, [*ids("ab"), END]
    )
    by_eos = await read_all(generate(edge))
    assert by_eos[-1].complete.stop_token_id == END
    assert by_eos[-1].complete.finish_reason == "stop"
    assert text_of(by_eos) == "ab"
    assert by_eos[-2].chunk.token_ids[-1] == END
    own = pb.SamplingParams(stop_token_ids=ids("b"), ignore_eos=True)
    by_id = await read_all(generate(edge, sampling=own))
    assert (by_id[-1].complete.stop_token_id, text_of(by_id)) == (ids("b")[0], "a")


async def test_requests_get_an_id_and_a_seed(edge: Edge) -> None:
    """Nobody could abort, or repeat, a request without them."""
    edge.engine.script = says("x")
    answers = [await read_all(generate(edge)) for _ in range(2)]
    first, second = (answer[0].started for answer in answers)
    assert first.request_id
    assert first.request_id != second.request_id
    assert first.seed != second.seed
    assert edge.engine.submitted[0].new.sampling.seed == first.seed


@pytest.mark.parametrize(
    ("fields", "code", "part"),
    [
        ({"text": ""}, grpc.StatusCode.INVALID_ARGUMENT, "text is ''"),
        (
            {"sampling": pb.SamplingParams(temperature=-1)},
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling.temperature is -1.0",
        ),
        ({"request_id": "a\nb"}, grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
        (
            {"sampling": pb.SamplingParams(beam_width=2, n=3)},
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling.n is 3; allowed: 1 to 2 (beam_width)",
        ),
        (
            {"sampling": pb.SamplingParams(n=65)},
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling.n is 65; allowed: 1 to 64 (max_requests_per_batch)",
        ),
    ],
)
async def test_a_refused_request_gets_a_status_and_hurts_nobody(
    edge: Edge, fields: dict[str, Any], code: grpc.StatusCode, part: str
) -> None:
    """A bad request must not disturb the one beside it, nor leave its id taken."""
    beside = generate(edge, request_id="beside")
    await started(beside)
    for _ in range(2):
        status, details = await status_of(generate(edge, **{"request_id": "bad", **fields}))
        assert status == code
        assert part in details
    edge.engine.speak("beside", ids("ok"))
    edge.engine.end("beside")
    assert text_of(await read_all(beside)) == "ok"
    assert [submission.new.request_id for submission in edge.engine.submitted] == ["beside"]


async def test_a_live_id_is_refused_and_its_owner_goes_on(edge: Edge) -> None:
    """Otherwise a retry takes tokens from the first try."""
    first = generate(edge, request_id="r")
    await started(first)
    code, details = await status_of(generate(edge, request_id="r"))
    assert code == grpc.StatusCode.ALREADY_EXISTS
    assert "'r'" in details
    edge.engine.speak("r", ids("ok"))
    edge.engine.end("r")
    assert text_of(await read_all(first)) == "ok"
    edge.engine.script = says("again")
    assert text_of(await read_all(generate(edge, request_id="r"))) == "again"


async def test_a_failure_is_a_status_after_what_was_said(edge: Edge) -> None:
    """Errors are never in-band: a client must not take half an answer for a whole one."""
    call = generate(edge, request_id="r")
    await started(call)
    edge.engine.speak("r", ids("half"))
    edge.engine.fail("r", RequestFailed("request r: its step made the worker fail"))
    assert [(await call.read()).chunk.text for _ in "half"] == list("half")
    code, details = await status_of(call)
    assert code == grpc.StatusCode.INTERNAL
    assert "request r" in details


async def test_a_full_queue_says_when_to_retry(edge: Edge) -> None:
    """Client libraries read RetryInfo; without it they hammer or give up."""
    edge.engine.script = lambda engine, submission: engine.fail(
        submission.new.request_id, QueueFull(9, 9, retry_seconds=2.0)
    )
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await read_all(generate(edge))
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_queue_size is 9" in (error.value.details() or "")
    trailing = dict(error.value.trailing_metadata())
    assert b"google.rpc.RetryInfo" in trailing[DETAILS_KEY]


async def test_a_bug_is_internal_and_logged(edge: Edge, caplog: pytest.LogCaptureFixture) -> None:
    """The log gets the traceback, the client no innards."""

    def breaks(engine: FakeEngine, submission: Any) -> None:
        raise ZeroDivisionError("secret innards")

    edge.engine.script = breaks
    code, details = await status_of(generate(edge))
    edge.engine.live.clear()
    assert code == grpc.StatusCode.INTERNAL
    assert "secret" not in details
    assert "ZeroDivisionError" in caplog.text


# Before the first worker


async def test_requests_wait_for_the_model(unready_edge: Edge) -> None:
    """A start that takes a minute must not refuse those who come early."""
    unready_edge.engine.script = says("at last")
    call = generate(unready_edge)
    await until(lambda: unready_edge.server.num_live == 1)
    info = await unready_edge.inference.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.is_ready, info.requests_waiting, info.worker) == (False, 1, "none")
    unready_edge.engine.become(worker="loading")
    unready_edge.engine.become_ready()
    assert text_of(await read_all(call)) == "at last"


async def test_no_worker_ever(unready_edge: Edge) -> None:
    """UNAVAILABLE with the reason, for those who wait and for those who come."""
    call = generate(unready_edge)
    await until(lambda: unready_edge.server.num_live == 1)
    unready_edge.engine.become(fatal_error="model type gpt9 is not supported")
    for one in (call, generate(unready_edge)):
        code, details = await status_of(one)
        assert (code, details) == (
            grpc.StatusCode.UNAVAILABLE,
            "model type gpt9 is not supported",
        )


async def test_other_calls_do_not_wait(unready_edge: Edge) -> None:
    """A monitor that asks for the model's name must get an answer, not a hanging call."""
    stub = unready_edge.inference
    for call in (
        stub.GetModelInfo(pb.GetModelInfoRequest()),
        stub.Tokenize(pb.TokenizeRequest(text="a")),
        stub.Detokenize(pb.DetokenizeRequest(token_ids=[1])),
    ):
        code, details = await status_of(call)
        assert code == grpc.StatusCode.UNAVAILABLE
        assert "not loaded yet (worker: none)" in details


# The other calls


async def test_tokenize_and_back(edge: Edge) -> None:
    """Clients count tokens with it; it must agree with Generate."""
    stub = edge.inference
    asked = await stub.Tokenize(pb.TokenizeRequest(text="ďx"))
    assert list(asked.token_ids) == ids("ďx")
    messages = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    as_chat = await stub.Tokenize(pb.TokenizeRequest(chat=messages))
    start = BYTES.token_to_id("<|im_start|>")
    assert as_chat.token_ids[0] == start
    shown = await stub.Detokenize(pb.DetokenizeRequest(token_ids=[start, *ids("ďx")]))
    assert shown.text == "ďx"
    shown = await stub.Detokenize(
        pb.DetokenizeRequest(token_ids=[start, *ids("ďx")], skip_special_tokens=False)
    )
    assert shown.text == "<|im_start|>ďx"
    code, details = await status_of(stub.Tokenize(pb.TokenizeRequest()))
    assert (code, "prompt" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    code, details = await status_of(stub.Detokenize(pb.DetokenizeRequest(token_ids=[5, 300])))
    assert (code, "token_ids[1] is 300" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_model_info(edge: Edge) -> None:
    """What a gateway registers a server by."""
    info = await edge.inference.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model, info.model_path) == ("smollm2-135m-instruct", FACTS.model_path)
    assert (info.vocab_size, info.max_model_len, info.dtype) == (300, 128, "float32")
    assert (list(info.eos_token_ids), info.has_chat_template) == ([END], True)
    assert info.default_sampling == pb.SamplingParams()


def test_the_models_own_defaults_are_shown() -> None:
    """A client must know what it gets when it says nothing."""
    stated = {
        "temperature": 0.5, "repetition_penalty": 1.25, "min_new_tokens": 2, "length_penalty": 0.5,
        "early_stopping": True, "sequence_bias": [[ids("a"), 1.5]], "bad_words_ids": [ids("bc")],
    }  # fmt: skip
    assert _default_sampling(
        replace(MODEL, tokenizer=Tokenizer(chat(), stated))
    ) == pb.SamplingParams(
        temperature=0.5,
        repetition_penalty=1.25,
        min_tokens=2,
        length_penalty=0.5,
        early_stopping=True,
        logit_bias={ids("a")[0]: 1.5},
        bad_words=["bc"],
    )


async def test_server_info(edge: Edge) -> None:
    """The settings in effect are the first thing to look at when a server behaves oddly."""
    edge.engine.become(num_running=2, num_waiting=3)
    info = await edge.inference.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.is_ready, info.worker, info.device) == (True, "ready", "cpu")
    assert (info.requests_running, info.requests_waiting) == (2, 3)
    assert info.version
    assert info.uptime_seconds > 0
    assert info.config["max_batch_tokens"] == "2048"
    assert (info.config["safety_margin"], info.config["deterministic"]) == ("unset", "false")


async def test_the_queue_limit_counts_those_that_wait_for_the_model(
    make_edge: Any, config: Config
) -> None:
    """A queue limit that does not count those in front of the door is none."""
    edge = await make_edge(replace(config, max_queue_size=3), is_ready=False)
    edge.engine.become(num_waiting=1)
    calls = [generate(edge) for _ in range(3)]  # at once: the last one counts those before it
    statuses = [asyncio.ensure_future(status_of(call)) for call in calls]
    refused, waiting = await asyncio.wait(statuses, return_when=asyncio.FIRST_COMPLETED)
    ((code, details),) = [status.result() for status in refused]
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details == "3 requests are waiting; max_queue_size is 3: retry later"
    await until(lambda: edge.server.num_live == 2)
    info = await edge.inference.GetServerInfo(pb.GetServerInfoRequest())
    assert info.requests_waiting == 3
    for call in calls:
        call.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await until(lambda: edge.server.num_live == 0)
    await stop(edge)


async def test_many_streams_side_by_side(edge: Edge) -> None:
    """Every token must reach its own request, whatever the order of events."""
    calls = [generate(edge, request_id=f"r{number}") for number in range(40)]
    for call in calls:
        await started(call)
    for letter in "abcdefgh":
        for number in reversed(range(40)):
            edge.engine.speak(f"r{number}", ids(f"{letter}{number} "))
    for number in range(40):
        edge.engine.end(f"r{number}", FinishReason.LENGTH)
    for number, call in enumerate(calls):
        answer = await read_all(call)
        assert text_of(answer) == "".join(f"{letter}{number} " for letter in "abcdefgh")
