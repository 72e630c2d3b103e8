"""gRPC, engine and core together, with a shadow worker: what the parts' own tests cannot see."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio

from protos import admin_pb2, admin_pb2_grpc, inference_pb2_grpc, link_pb2
from protos import inference_pb2 as pb
from protos.plan import StepPlan
from scheduler_svc.core.limits import FULL_ATTENTION, Geometry, GroupGeometry, Limits
from scheduler_svc.engine import views
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.worker_link import WorkerMessage
from scheduler_svc.front.server import Server
from scheduler_svc.front.streams import LiveStream
from scheduler_svc.settings.config import Config
from scheduler_svc.text.tokenizer import Tokenizer
from tests.support.calls import BYTES, read_all
from tests.support.expected_answers import expected_tokens
from tests.support.memory_link import MemoryLink
from tests.support.small_tokenizers import chat

GEOMETRY = Geometry(
    4, 40 + 2, 64, (GroupGeometry(FULL_ATTENTION, 1, 1),), max_model_len=64, num_swap_chunks=8
)
VOCAB_SIZE = 256
PROMPT = list(range(10, 23))


class WillingWorker(MemoryLink):
    """Connects by itself and computes every plan at once."""

    def start(self, on_message: Callable[[WorkerMessage], None], on_death: Any = None) -> None:
        super().start(on_message)
        self.hello()

    def send(self, message: link_pb2.Envelope, plan: StepPlan | None = None) -> None:
        super().send(message, plan)
        if message.WhichOneof("message") == "configure":
            self.ready()
        while self.answer():
            pass


@pytest_asyncio.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    """To a server that is ready, with four rows."""
    config = Config(
        host="127.0.0.1", port=0, page_size=4, max_batch_tokens=16, max_requests_per_batch=4
    )
    link = WillingWorker(GEOMETRY, 4, VOCAB_SIZE)

    limits = Limits(config.max_batch_tokens, config.max_requests_per_batch)
    engine = Engine(limits, config.to_configure(), link, heartbeat_timeout=600)  # type: ignore[arg-type]
    server = Server(config, engine, lambda path: Tokenizer(chat()))
    await server.start(lambda error: None)
    await server.served.wait_until_ready_is(True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel
    await server.drain_and_stop()


def request(**fields: Any) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=12, temperature=1, seed=3, ignore_eos=True, **fields)
    return pb.GenerateRequest(tokens=pb.TokenIds(ids=PROMPT), sampling=sampling)


async def test_siblings_from_the_wire_to_the_core_and_back(channel: grpc.aio.Channel) -> None:
    """The index that a client reads is the one whose uniforms were drawn; texts are its tokens'."""
    stub: Any = inference_pb2_grpc.InferenceStub(channel)
    want = expected_tokens(
        [PROMPT] * 3, [12] * 3, VOCAB_SIZE, [1.0] * 3, [3] * 3, siblings=range(3)
    )
    for asked in (request(n=3), request(n=3)):
        responses = await read_all(stub.Generate(asked, timeout=10))
        for index, tokens in enumerate(want):
            mine = [response for response in responses if response.index == index]
            chunks = [response.chunk for response in mine]
            assert [token for chunk in chunks for token in chunk.token_ids] == tokens
            assert "".join(chunk.text for chunk in chunks) == BYTES.decode(tokens)
            assert mine[-1].complete.finish_reason == "length"
    usage = mine[-1].complete.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (13, 12, 12)


async def test_deltas_merge_for_a_slow_reader(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message per token for a client that does not read fills the memory; or some is lost."""
    next_event = LiveStream.next

    async def next_when_all_is_said(stream: LiveStream) -> Any:
        await stream._ended.wait()
        return await next_event(stream)

    monkeypatch.setattr(LiveStream, "next", next_when_all_is_said)
    stub: Any = inference_pb2_grpc.InferenceStub(channel)
    responses = await read_all(stub.Generate(request(), timeout=10))
    chunks = [response.chunk for response in responses if response.HasField("chunk")]
    (want,) = expected_tokens([PROMPT], [12], VOCAB_SIZE, [1.0], [3])
    assert [list(chunk.token_ids) for chunk in chunks] == [want[:1], want[1:]]
    assert "".join(chunk.text for chunk in chunks) == BYTES.decode(want)


async def test_what_an_operator_sees_of_the_cache(channel: grpc.aio.Channel) -> None:
    """Every figure of GetCache comes from the core; a name that differs would read 0 for ever."""
    stub: Any = inference_pb2_grpc.InferenceStub(channel)
    admin: Any = admin_pb2_grpc.AdminStub(channel)
    for _ in range(2):
        await read_all(stub.Generate(request(), timeout=10))
    cache = await admin.GetCache(admin_pb2.GetCacheRequest())
    assert (cache.page_size, cache.chunks_total, cache.chunks_free) == (4, 40, 40)
    assert (cache.prefix_queries, cache.prefix_hits) == (26, 12)
    assert (cache.swap_chunks_total, cache.swap_chunks_free) == (8, 8)
    assert (cache.utilisation, cache.tokens_stored) == (0.0, 0)
    (group,) = cache.groups
    cached = group.blocks_cached
    assert 6 <= cached <= 7  # 25 tokens, the last of which needs no KV
    assert (group.group, group.blocks_total, group.blocks_free) == (FULL_ATTENTION, 40, 40)
    flushed = await admin.FlushCache(admin_pb2.FlushCacheRequest())
    assert flushed.blocks_flushed == cached
    cache = await admin.GetCache(admin_pb2.GetCacheRequest())
    assert cache.groups[0].blocks_cached == 0
    responses = await read_all(stub.Generate(request(), timeout=10))
    assert responses[-1].complete.usage.cached_tokens == 0
    message_fields = {spec.name for spec in cache.DESCRIPTOR.fields}
    assert message_fields == set(views.CacheView.__dataclass_fields__)
    group_fields = {spec.name for spec in group.DESCRIPTOR.fields}
    assert group_fields == set(views.CacheGroupView.__dataclass_fields__)
