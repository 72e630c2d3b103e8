"""vllm.grpc.engine.VllmEngine: the answers that the gateway reads, from a fake engine."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

pytest.importorskip("smg_grpc_proto", reason="needs the extra gateway")

from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common

from scheduler_svc.core.memory.cache_events import Cleared, RemovedBlock, StoredBlock
from scheduler_svc.engine.events import Submission
from scheduler_svc.front.gateway.cache_batches import MAX_EVENTS, batches, folded
from tests.support.edge import Edge
from tests.support.fake_engine import FakeEngine


def stub(edge: Edge) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(edge.channel)


def request(**sampling: Any) -> Any:
    """A streamed one of three tokens."""
    return vllm.GenerateRequest(
        request_id="a",
        tokenized=vllm.TokenizedInput(input_ids=[65, 66, 67]),
        sampling_params=vllm.SamplingParams(**{"max_tokens": 3, **sampling}),
        stream=True,
    )


def say(engine: FakeEngine, submission: Submission) -> None:
    for index in range(submission.new.n):
        engine.speak(submission.new.request_id, [70, 71, 72], index)


async def answers(edge: Edge, asked: Any) -> list[Any]:
    edge.engine.script = say
    return [response async for response in stub(edge).Generate(asked)]


async def test_a_stream_counts_each_token_once(edge: Edge) -> None:
    """vLLM's chunks count their own tokens; sums over all so far are SGLang's."""
    edge.engine.cached_tokens = 2
    *chunks, last = await answers(edge, request())
    assert [list(one.chunk.token_ids) for one in chunks] == [[70], [71], [72]]
    assert [one.chunk.completion_tokens for one in chunks] == [1, 1, 1]
    assert {one.chunk.prompt_tokens for one in chunks} == {3}
    end = last.complete
    assert (end.finish_reason, end.prompt_tokens, end.completion_tokens) == ("length", 3, 3)
    assert (end.cached_tokens, list(end.output_ids)) == (2, [])


async def test_in_one_piece(edge: Edge) -> None:
    """A gateway that asks for no stream reads the last message only."""
    asked = request(n=2)
    asked.stream = False
    ends = [one.complete for one in await answers(edge, asked)]
    assert [end.index for end in ends] == [0, 1]
    assert [list(end.output_ids) for end in ends] == [[70, 71, 72], [70, 71, 72]]


async def test_text_is_tokenized_and_counted(edge: Edge) -> None:
    """The prompt's length is not that of the empty list of tokens."""
    asked = request()
    asked.text = "abc"
    first, *_ = await answers(edge, asked)
    assert first.chunk.prompt_tokens == len(edge.engine.submitted[0].new.prompt_token_ids) > 0


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "temperature": 1.0}),
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"top_p": 0.5, "top_k": 7, "min_p": 0.25}, {"top_p": 0.5, "top_k": 7, "min_p": 0.25}),
        ({"seed": 0}, {"seed": 0}),
        ({"frequency_penalty": -1.0}, {"frequency_penalty": -1.0}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"stop_token_ids": [9], "ignore_eos": True}, {"stop_token_ids": frozenset([9])}),
    ],
    ids=str,
)
async def test_sampling_arrives(
    edge: Edge, sampling: dict[str, Any], expected: dict[str, Any]
) -> None:
    """0 means unset where that API cannot tell: top_p = 0 would be refused."""
    await answers(edge, request(**sampling))
    arrived = edge.engine.submitted[0].new.sampling
    assert {name: getattr(arrived, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"max_tokens": 1000}, "sampling.max_tokens is 1000; allowed: at most"),
        ({"logprobs": -1}, "sampling.logprobs is -1"),
        ({"structural_tag": "{}"}, "sampling_params.structural_tag"),
        ({"truncate_prompt_tokens": 5}, "sampling_params.truncate_prompt_tokens"),
        ({"top_k": 1 << 31}, "sampling_params.top_k is 2147483648"),
        ({"stop_token_ids": [1 << 31]}, "sampling.stop_token_ids"),
        ({"n": 1000}, "sampling.n is 1000"),
    ],
    ids=str,
)
async def test_what_cannot_be_done_is_refused_by_name(
    edge: Edge, sampling: dict[str, Any], message: str
) -> None:
    """Through the same guard as Chairlift's own service: no INTERNAL, nothing ignored."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers(edge, request(**sampling))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert message in str(caught.value.details())


async def test_the_end_says_what_matched(edge: Edge) -> None:
    """A gateway hides what ended an answer, and must know what it is."""
    *_, last = await answers(edge, request(stop_token_ids=[71]))
    assert (last.complete.finish_reason, last.complete.matched_token_id) == ("stop", 71)
    said = edge.server.served.model.tokenizer.decode([71], True)
    *_, last = await answers(edge, request(stop=[said]))
    assert (last.complete.finish_reason, last.complete.matched_stop_str) == ("stop", said)


async def test_abort_ends_the_request(edge: Edge) -> None:
    """An unknown id is no error."""
    call = stub(edge).Generate(request())
    arrived = asyncio.Event()
    edge.engine.script = lambda engine, submission: arrived.set()
    reading = asyncio.ensure_future(call.read())
    await arrived.wait()
    await stub(edge).Abort(vllm.AbortRequest(request_ids=["a", "nobody"]))
    assert (await reading).complete.finish_reason == "abort"


async def test_health_follows_the_worker(edge: Edge, unready_edge: Edge) -> None:
    """Both ways of asking: a gateway must not send requests to a pair that has no worker."""
    for one, is_ready in ((edge, True), (unready_edge, False)):
        health = await stub(one).HealthCheck(vllm.HealthCheckRequest())
        assert health.healthy == is_ready
        assert bool(health.message) != is_ready


async def test_model_info(edge: Edge) -> None:
    """What a gateway chooses tokenizer, parsers and limits by."""
    info = await stub(edge).GetModelInfo(vllm.GetModelInfoRequest())
    assert info.is_generation
    assert (info.max_context_length, info.vocab_size) == (128, 300)
    assert list(info.architectures) == ["LlamaForCausalLM"]
    assert info.tokenizer_path == info.model_path == "/models/tiny"


async def test_what_there_is_not_is_unimplemented(edge: Edge) -> None:
    """With a sentence, not the library's "Method not implemented!"."""
    for call in (
        stub(edge).Embed(vllm.EmbedRequest()),
        stub(edge).StartProfile(common.StartProfileRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="VllmEngine") as caught:
            await call
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_flush(edge: Edge) -> None:
    edge.engine.cached_blocks = 7
    flushed = await stub(edge).FlushCache(common.FlushCacheRequest())
    assert flushed.success
    assert "7" in flushed.message


def test_cache_events_as_messages() -> None:
    """Wrong parents or hashes would route requests to a pair that does not have their prefix."""
    first, second = b"\xff" * 16, b"\x01" * 16
    events = [
        Cleared(),
        StoredBlock(first, None, (1, 2)),
        StoredBlock(second, first, (3, 4)),
        RemovedBlock(second),
    ]
    (batch,) = batches(events, page_size=2)
    cleared, one, two, removed = batch.events
    assert cleared.WhichOneof("data") == "cleared"
    assert not one.stored.HasField("parent_block_hash")
    assert two.stored.parent_block_hash == one.stored.blocks[0].block_hash == folded(first) == -1
    assert list(two.stored.blocks[0].token_ids) == [3, 4]
    assert two.stored.blocks[0].block_size == 2
    assert list(removed.removed.block_hashes) == [two.stored.blocks[0].block_hash]
    many = list(batches([RemovedBlock(first)] * (MAX_EVENTS + 1), page_size=2))
    assert [len(batch.events) for batch in many] == [MAX_EVENTS, 1]
