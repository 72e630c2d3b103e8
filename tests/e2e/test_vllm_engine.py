"""vllm.grpc.engine.VllmEngine before a real engine: cache events, loads, tokenizer, answers."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from client import Chairlift
from tests.support.processes import Server

pytest.importorskip("smg_grpc_proto", reason="needs the extra gateway")

from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common

PAGE_SIZE = 16


@pytest.fixture(scope="module")
def stub(tiny_server: Server) -> Iterator[Any]:
    with grpc.insecure_channel(tiny_server.address) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def generate(stub: Any, prompt: list[int], **sampling: Any) -> list[Any]:
    request = vllm.GenerateRequest(
        tokenized=vllm.TokenizedInput(input_ids=prompt),
        sampling_params=vllm.SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **sampling}),
        stream=True,
    )
    return list(stub.Generate(request, timeout=60))


def test_cache_events_follow_the_cache(stub: Any) -> None:
    """A gateway that hears nothing at first takes the worker for dead; one that hears wrong blocks
    sends requests to a pair that must compute their prefix again."""
    stub.FlushCache(common.FlushCacheRequest(), timeout=60)
    batches = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(), timeout=60)
    first = next(batches)
    assert first.sequence_number == 1
    assert [event.WhichOneof("data") for event in first.events] == ["cleared"]
    prompt = [7 + place % 90 for place in range(3 * PAGE_SIZE)]
    generate(stub, prompt, max_tokens=1)
    stored: list[Any] = []
    number = 1
    while len(stored) < 3:
        batch = next(batches)
        number += 1
        assert batch.sequence_number == number
        stored += [event.stored for event in batch.events]
    assert [token for one in stored for token in one.blocks[0].token_ids] == prompt
    assert {one.blocks[0].block_size for one in stored} == {PAGE_SIZE}
    hashes = [one.blocks[0].block_hash for one in stored]
    assert len(set(hashes)) == 3
    assert not stored[0].HasField("parent_block_hash")
    assert [one.parent_block_hash for one in stored[1:]] == hashes[:2]
    late = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(), timeout=60)
    kinds = [event.WhichOneof("data") for event in next(late).events]
    assert kinds == ["cleared", "stored", "stored", "stored"]
    stub.FlushCache(common.FlushCacheRequest(), timeout=60)
    gone: list[int] = []
    while len(gone) < 3:
        for event in next(batches).events:
            gone += hashes if event.HasField("cleared") else event.removed.block_hashes
    assert set(gone) == set(hashes)
    batches.cancel()
    late.cancel()


def test_answers_are_those_of_chairlifts_own_service(stub: Any, tiny_server: Server) -> None:
    """Two services, one engine: tokens, counts and log probabilities are the same."""
    prompt = [30, 40, 50, 60]
    *chunks, last = generate(stub, prompt, logprobs=2, prompt_logprobs=1)
    tokens = [token for one in chunks for token in one.chunk.token_ids]
    with Chairlift(tiny_server.address) as chairlift:
        own = chairlift.complete(prompt, temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    assert tuple(tokens) == own.token_ids
    assert last.complete.prompt_tokens == own.usage.prompt_tokens
    assert last.complete.completion_tokens == own.usage.completion_tokens
    said = [one.chunk.output_logprobs for one in chunks if one.chunk.HasField("output_logprobs")]
    assert [token for part in said for token in part.token_ids] == tokens
    ours = [score.logprob for score in own.logprobs]
    assert [value for part in said for value in part.token_logprobs] == pytest.approx(ours)
    assert [len(top.values) for part in said for top in part.top_logprobs] == [2] * 4
    (read,) = [one.chunk.input_logprobs for one in chunks if one.chunk.HasField("input_logprobs")]
    assert list(read.token_ids) == prompt
    assert not read.token_logprobs[0].HasField("value")
    values = [one.value for one in read.token_logprobs[1:]]
    assert values == pytest.approx([score.logprob for score in own.prompt_logprobs])


def test_loads_and_server_info(stub: Any) -> None:
    """A gateway balances by them."""
    (load,) = stub.GetLoads(vllm.GetLoadsRequest(), timeout=60).loads
    assert (load.num_running_reqs, load.num_waiting_reqs) == (0, 0)
    assert load.max_running_requests == 24
    assert 0 < load.max_total_num_tokens <= 600 * PAGE_SIZE
    info = stub.GetServerInfo(vllm.GetServerInfoRequest(), timeout=60)
    assert (info.block_size, info.max_num_seqs, info.data_parallel_size) == (PAGE_SIZE, 24, 1)
    assert info.active_requests == 0


def test_tokenizer_files(stub: Any, tiny_model: Path) -> None:
    """For a gateway on another machine."""
    chunks = list(stub.GetTokenizer(common.GetTokenizerRequest(), timeout=60))
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        name = "tokenizer.json"
        assert archive.read(name) == (tiny_model / name).read_bytes()
