"""chairlift.v1.Inference: the service that clients call.

Handlers are coroutines that write, and not generators: one suspended at a `yield` is only closed
when the garbage collector finds it. Errors are raised; statuses.py turns them into gRPC statuses.

Does not own: the life of a request (generations.py), its validation (validation.py).
"""

from __future__ import annotations

import importlib.metadata
import time
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import grpc

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from scheduler_svc.engine.events import Delta, Finished
from scheduler_svc.front.generations import Generations
from scheduler_svc.front.prompts import detokenize, prompt_bytes, prompt_token_ids
from scheduler_svc.front.responses import responses
from scheduler_svc.front.served_model import Model, ServedModel
from scheduler_svc.front.streams import LiveStream, LiveStreams
from scheduler_svc.settings.config import Config

if TYPE_CHECKING:
    from scheduler_svc.engine.engine import Engine

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServicer):  # type: ignore[misc]
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
        self._threads = generations.threads
        self._started = time.monotonic()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        is_streamed = request.stream or not request.HasField("stream")
        async with self._generations.run(request, is_streamed) as (stream, seed):
            started = pb.Started(
                request_id=stream.request_id, seed=seed, model=self._config.model_name
            )
            await context.write(pb.GenerateResponse(started=started))
            await (_write_deltas if is_streamed else _write_whole)(stream, context)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        return pb.AbortResponse(aborted=await self._generations.abort(request.request_ids))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        add_special = request.add_special_tokens or not request.HasField("add_special_tokens")
        ids = await self._threads.run(
            prompt_bytes(request), prompt_token_ids, request, self._served.model, add_special
        )
        return pb.TokenizeResponse(token_ids=ids)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        num_bytes = 4 * len(request.token_ids)
        text = await self._threads.run(num_bytes, detokenize, request, self._served.model)
        return pb.DetokenizeResponse(text=text)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        model = self._served.model
        facts = model.facts
        return pb.GetModelInfoResponse(
            model=model.name,
            model_path=facts.model_path,
            model_type=facts.model_type,
            architecture=facts.architecture,
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            eos_token_ids=model.tokenizer.eos_token_ids,
            has_chat_template=model.tokenizer.has_chat_template,
            dtype=facts.dtype,
            default_sampling=_default_sampling(model),
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        status = self._engine.status
        return pb.GetServerInfoResponse(
            version=_version(),
            uptime_seconds=time.monotonic() - self._started,
            is_ready=self._served.is_ready and not self._streams.is_refusing,
            worker=status.worker,
            worker_busy=status.busy,
            device=self._config.device if status.model is None else status.model.device,
            requests_running=status.num_running,
            requests_waiting=self._generations.num_waiting,
            error=self._served.error or "",
            config={spec.name: _shown(getattr(self._config, spec.name)) for spec in fields(Config)},
        )


async def _write_deltas(stream: LiveStream, context: Context) -> None:
    while (event := await stream.next()) is not None:
        await _write(event, context)


async def _write_whole(stream: LiveStream, context: Context) -> None:
    for delta, end in await stream.whole():
        await _write(delta, context)
        await _write(end, context)


async def _write(event: Delta | Finished, context: Context) -> None:
    for response in responses(event):
        await context.write(response)


def _default_sampling(model: Model) -> pb.SamplingParams:
    """What the model states; a banned token sequence as its text."""
    defaults = model.tokenizer.defaults
    params = pb.SamplingParams(logit_bias=defaults.logit_bias)
    for name, value in defaults.numbers.items():
        setattr(params, name, value)
    params.bad_words.extend(model.tokenizer.decode(ids, False) for ids in defaults.bad_words)
    return params


def _version() -> str:
    try:
        return importlib.metadata.version("chairlift")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


def _shown(value: object) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)
