"""vllm.grpc.engine.VllmEngine: the service that the gateway `smg` calls.

Requests take the same way as those of chairlift.v1.Inference: one validation, one engine. This file
translates; errors are raised, and statuses.py turns them into gRPC statuses.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common

from scheduler_svc.core.state import State
from scheduler_svc.engine.cache_feed import Subscription
from scheduler_svc.engine.events import Delta, Finished
from scheduler_svc.engine.views import get_cache
from scheduler_svc.errors import NotImplementedYet
from scheduler_svc.front.gateway.cache_batches import batches
from scheduler_svc.front.gateway.tokenizer_archive import pieces, tokenizer_archive
from scheduler_svc.front.gateway.vllm_requests import translated
from scheduler_svc.front.gateway.vllm_responses import Answers
from scheduler_svc.front.generations import Generations
from scheduler_svc.front.served_model import ServedModel
from scheduler_svc.front.streams import LiveStreams
from scheduler_svc.settings.config import Config

if TYPE_CHECKING:
    from scheduler_svc.engine.engine import Engine

Context = grpc.aio.ServicerContext[Any, Any]

SERVICE: Final[str] = vllm.DESCRIPTOR.services_by_name["VllmEngine"].full_name


class VllmService(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    def __init__(
        self,
        config: Config,
        engine: Engine,
        streams: LiveStreams,
        served: ServedModel,
        generations: Generations,
    ) -> None:
        self._config = config
        self._engine = engine
        self._streams = streams
        self._served = served
        self._generations = generations
        self._started = time.monotonic()
        self._last_request = 0.0  # time.time()

    async def Generate(self, request: Any, context: Context) -> None:
        self._last_request = time.time()
        own = translated(request)
        async with self._generations.run(own, request.stream) as (stream, _):
            answers = Answers(stream.prompt_token_ids)
            if not request.stream:
                for delta, end in await stream.whole():
                    await context.write(answers.complete(end, delta))
                return
            while (event := await stream.next()) is not None:
                if isinstance(event, Delta):
                    await context.write(answers.chunk(event))
                else:
                    assert isinstance(event, Finished)
                    await context.write(answers.complete(event))

    async def Abort(self, request: Any, context: Context) -> Any:
        await self._generations.abort(request.request_ids)
        return vllm.AbortResponse()

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        is_healthy = self._served.is_ready and not self._streams.is_refusing
        message = "" if is_healthy else self._served.error or "no worker is ready"
        return vllm.HealthCheckResponse(healthy=is_healthy, message=message)

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        model = await self._served.wait()
        facts, tokenizer = model.facts, model.tokenizer
        longest = min(facts.max_model_len, facts.pool_tokens)
        return vllm.GetModelInfoResponse(
            model_path=facts.model_path,
            is_generation=True,
            max_context_length=longest,
            vocab_size=facts.vocab_size,
            served_model_name=model.name,
            tokenizer_path=facts.model_path,
            model_type=facts.model_type,
            architectures=[facts.architecture],
            eos_token_ids=tokenizer.eos_token_ids,
            max_req_input_len=longest - 1,
            default_sampling_params_json=json.dumps(tokenizer.defaults.numbers),
        )

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        facts = self._engine.status.model
        return vllm.GetServerInfoResponse(
            active_requests=len(self._streams),
            is_paused=self._streams.is_refusing,
            last_receive_timestamp=self._last_request,
            uptime_seconds=time.monotonic() - self._started,
            server_type="vllm-grpc",  # the service that it speaks, not the engine
            data_parallel_size=1,
            block_size=await self._ask(lambda state: state.memory.page_size),
            model_dtype="" if facts is None else facts.dtype,
            max_num_seqs=self._config.max_requests_per_batch,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: Any, context: Context) -> Any:
        return vllm.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            dp_rank_count=1,
            loads=[await self._ask(self._load)],
        )

    def _load(self, state: State) -> Any:
        cache = get_cache(state)
        capacity = state.geometry.pool_tokens() or 1
        pending = state.pending.in_order()
        waiting = sum(len(request.token_ids) for request in pending)
        running = len(state.rows.running)
        used = (cache.chunks_total - cache.chunks_free) / max(1, cache.chunks_total)
        return vllm.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=state.num_live - running,
            num_total_reqs=state.num_live,
            num_used_tokens=cache.tokens_stored,
            max_total_num_tokens=capacity,
            token_usage=used,
            cache_hit_rate=cache.prefix_hits / max(1, cache.prefix_queries),
            utilization=running / self._config.max_requests_per_batch,
            max_running_requests=self._config.max_requests_per_batch,
            num_waiting_uncached_tokens=waiting,
        )

    async def GetTokenizer(self, request: Any, context: Context) -> None:
        model = await self._served.wait()
        data, digest = await asyncio.to_thread(tokenizer_archive, model.facts.model_path)
        for piece in pieces(data):
            await context.write(common.GetTokenizerChunk(data=piece))
        await context.write(common.GetTokenizerChunk(sha256=digest))

    async def SubscribeKvEvents(self, request: Any, context: Context) -> None:
        """Begins with the current state, whatever sequence number is asked for; so it does again
        for a gateway that has read too slowly."""
        page_size = await self._ask(lambda state: state.memory.page_size)
        sequence = 0
        while True:
            async with self._subscription() as subscription:
                while events := await subscription.next():
                    for batch in batches(events, page_size):
                        sequence += 1
                        batch.sequence_number = sequence
                        await context.write(batch)

    @asynccontextmanager
    async def _subscription(self) -> AsyncIterator[Subscription]:
        subscription, feed = Subscription(), self._engine.cache_feed
        await self._ask(lambda state: feed.begin(state, subscription))
        try:
            yield subscription
        finally:
            self._engine.ask(lambda _: feed.end(subscription))

    async def FlushCache(self, request: Any, context: Context) -> Any:
        flushed = await asyncio.wrap_future(self._engine.flush_cache())
        return common.FlushCacheResponse(success=True, message=f"{flushed} blocks flushed")

    async def Embed(self, request: Any, context: Context) -> NoReturn:
        raise NotImplementedYet("VllmEngine.Embed: Chairlift generates text only")

    async def StartProfile(self, request: Any, context: Context) -> NoReturn:
        raise NotImplementedYet("VllmEngine.StartProfile is not supported yet")

    async def StopProfile(self, request: Any, context: Context) -> NoReturn:
        raise NotImplementedYet("VllmEngine.StopProfile is not supported yet")

    async def _ask(self, question: Any) -> Any:
        return await asyncio.wrap_future(self._engine.ask(question))


def add_to(
    server: Any,
    config: Config,
    engine: Engine,
    streams: LiveStreams,
    served: ServedModel,
    generations: Generations,
) -> str:
    """Adds the service to a gRPC server; returns its full name."""
    service = VllmService(config, engine, streams, served, generations)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(service, server)
    return SERVICE
