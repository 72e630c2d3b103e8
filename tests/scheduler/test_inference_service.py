"""chairlift.v1.Inference over a real connection, with a fake engine behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from protos import inference_pb2 as pb
from scheduler_svc.config import Config
from scheduler_svc.core.request import FinishReason
from scheduler_svc.errors import QueueFull, RequestFailed
from scheduler_svc.events import Delta
from scheduler_svc.statuses import DETAILS_KEY
from tests.scheduler.conftest import Edge, stop
from tests.scheduler.fake_engine import FACTS, FakeEngine
from tests.scheduler.small_tokenizers import byte_level

SECONDS = 10.0  # more than anything here takes
BYTES = byte_level()
END = BYTES.token_to_id("<|im_end|>")


def ids(text: str) -> list[int]:
    return list(BYTES.encode(text).ids)


def generate(edge: Edge, **fields: Any) -> Any:
    fields.setdefault("text", "hello")
    return edge.inference.Generate(pb.GenerateRequest(**fields), timeout=SECONDS)


async def read_all(call: Any) -> list[pb.GenerateResponse]:
    responses: list[pb.GenerateResponse] = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def started(call: Any) -> pb.Started:
    """From here on the engine knows the request."""
    response = await call.read()
    assert response.WhichOneof("event") == "started"
    return response.started


def kinds(responses: list[pb.GenerateResponse]) -> list[str | None]:
    return [response.WhichOneof("event") for response in responses]


def text_of(responses: list[pb.GenerateResponse]) -> str:
    return "".join(response.chunk.text for response in responses)


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await (read_all(call) if hasattr(call, "read") else call)
    return error.value.code(), error.value.details() or ""


async def until(is_so: Any) -> None:
    """Waits for what another task or process brings about; the deadline is the test's."""
    async with asyncio.timeout(SECONDS):
        while not is_so():  # noqa: ASYNC110 - also of what other processes do
            await asyncio.sleep(0.005)


def says(text: str) -> Any:
    """A script: the engine answers every request with this text."""

    def script(engine: FakeEngine, submission: Any) -> None:
        engine.speak(submission.new.request_id, ids(text))
        if submission.new.request_id in engine.live:
            engine.end(submission.new.request_id)

    return script


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
        ({"sampling": pb.SamplingParams(n=2)}, grpc.StatusCode.UNIMPLEMENTED, "sampling.n"),
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
    assert (await call.read()).chunk.text == "half"
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


# A request ends with its client, in every state


async def cancelled(edge: Edge, call: Any) -> None:
    call.cancel()


async def channel_closed(edge: Edge, call: Any) -> None:
    await edge.channel.close()


WAYS = pytest.mark.parametrize("leave", [cancelled, channel_closed])


@WAYS
@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_an_abort(
    edge: Edge, leave: Any, num_tokens: int, stream: bool
) -> None:
    """Tokens for nobody take the place of tokens for somebody."""
    call = generate(edge, request_id="r", stream=stream)
    await started(call)
    edge.engine.speak("r", ids("abc")[:num_tokens])
    await leave(edge, call)
    await until(lambda: edge.engine.aborted == ["r"])
    await until(lambda: edge.server.num_live == 0)


@WAYS
async def test_leaving_while_the_model_loads(unready_edge: Edge, leave: Any) -> None:
    """Such a request must not come to life when the worker is ready."""
    call = generate(unready_edge, request_id="r")
    await until(lambda: unready_edge.server.num_live == 1)
    await leave(unready_edge, call)
    await until(lambda: unready_edge.server.num_live == 0)
    unready_edge.engine.become_ready()
    await unready_edge.server.served.wait_until_ready_is(True)
    assert unready_edge.engine.submitted == []


async def test_a_client_that_never_reads_is_an_abort_when_it_leaves(
    edge: Edge, caplog: pytest.LogCaptureFixture
) -> None:
    """The handler then sits in a write, where the end shows as another exception."""
    call = generate(edge, request_id="r", sampling=pb.SamplingParams())
    await started(call)
    big = "x" * 100_000
    for _ in range(100):
        edge.engine.deliver([delta("r", big)])
        await asyncio.sleep(0)
    call.cancel()
    await until(lambda: edge.engine.aborted == ["r"])
    await until(lambda: edge.server.num_live == 0)
    assert "Traceback" not in caplog.text


async def test_deltas_merge_for_a_slow_reader(edge: Edge) -> None:
    """3 MB of deltas for a reader that sleeps become few messages, and none is lost."""
    call = generate(edge, request_id="r")
    await started(call)
    for number in range(100):
        edge.engine.deliver([delta("r", f"{number:03}" + "x" * 29_997)])
        await asyncio.sleep(0)
    edge.engine.end("r")
    responses = await read_all(call)
    assert len(responses) < 60
    text = text_of(responses)
    assert len(text) == 100 * 30_000
    assert [int(text[i : i + 3]) for i in range(0, len(text), 30_000)] == list(range(100))


def delta(request_id: str, text: str) -> Any:
    return Delta(request_id, [1], text)


async def test_a_deadline_is_an_abort(edge: Edge) -> None:
    """The client has stopped listening; grpc told it so itself."""
    call = edge.inference.Generate(pb.GenerateRequest(request_id="r", text="hello"), timeout=0.3)
    code, _ = await status_of(call)
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: edge.engine.aborted == ["r"])


async def test_the_servers_own_time_limit(make_edge: Any, config: Config) -> None:
    """request_timeout bounds clients that set no deadline."""
    edge = await make_edge(replace(config, request_timeout=0.2))
    code, details = await status_of(generate(edge, request_id="r"))
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert "request_timeout" in details
    assert edge.engine.aborted == ["r"]
    await stop(edge)


async def test_ending_is_no_abort(edge: Edge) -> None:
    """An abort after the end could hit the next request of the same id."""
    edge.engine.script = says("x")
    await read_all(generate(edge, request_id="r"))
    await until(lambda: edge.server.num_live == 0)
    edge.engine.script = None
    assert edge.engine.aborted == []


# Abort, asked for


async def test_abort_ends_streams_with_a_reason(edge: Edge) -> None:
    """The stream's own client learns that it was no mistake; unknown ids are ignored."""
    call = generate(edge, request_id="r")
    await started(call)
    edge.engine.speak("r", ids("ab"))
    request = pb.AbortRequest(request_ids=["unknown", "r", "r"])
    assert list((await edge.inference.Abort(request)).aborted) == ["r"]
    rest = await read_all(call)
    assert (text_of(rest), rest[-1].complete.finish_reason) == ("ab", "abort")
    assert rest[-1].complete.usage.completion_tokens == 2
    assert list((await edge.inference.Abort(request)).aborted) == []


async def test_abort_of_a_unary_answer_keeps_its_shape(edge: Edge) -> None:
    """Whoever waits for one chunk gets one, with what there was."""
    call = generate(edge, request_id="r", stream=False)
    await started(call)
    await edge.inference.Abort(pb.AbortRequest(request_ids=["r"]))
    assert kinds(await read_all(call)) == ["chunk", "complete"]


async def test_abort_while_the_model_loads(unready_edge: Edge) -> None:
    """The engine does not know the request yet, its client waits all the same."""
    call = generate(unready_edge, request_id="r")
    await until(lambda: unready_edge.server.num_live == 1)
    aborted = await unready_edge.inference.Abort(pb.AbortRequest(request_ids=["r"]))
    assert list(aborted.aborted) == ["r"]
    responses = await read_all(call)
    assert kinds(responses) == ["started", "complete"]
    assert responses[-1].complete.finish_reason == "abort"
    unready_edge.engine.become_ready()
    await unready_edge.server.served.wait_until_ready_is(True)
    assert unready_edge.engine.submitted == []


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


@pytest.fixture(autouse=True)
async def nothing_left_behind() -> AsyncIterator[None]:
    """A task that outlives its test belongs to a handler that was forgotten."""
    yield
    names = {task.get_coro().__qualname__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]
    assert not {name for name in names if "Service." in name}
