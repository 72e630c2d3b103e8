"""chairlift.v1.Inference: the service that clients call.

A handler validates the request, submits it to the engine, and writes the events of its stream. A
request waits for a row in the engine's queue, which holds token ids; until the model's tokenizer is
loaded there are none, so it waits here, in its handler. Both count towards max_queue_size.

However a handler ends — the client cancels, disconnects or times out, or a write fails — its
`finally` aborts the request if it is still live. Handlers are coroutines that write, and not
generators: one suspended at a `yield` is only closed when the garbage collector finds it.

Errors are raised; statuses.py turns them into gRPC statuses.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import grpc

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from scheduler_svc.engine.events import Delta, Finished, Submission
from scheduler_svc.errors import DeadlineExceeded, QueueFull, RequestRejected
from scheduler_svc.front.prompts import detokenize, prompt_bytes, prompt_token_ids
from scheduler_svc.front.responses import responses
from scheduler_svc.front.served_model import Model, ServedModel
from scheduler_svc.front.streams import LiveStream, LiveStreams
from scheduler_svc.front.validation import check_request_id, num_siblings, validate
from scheduler_svc.settings.config import Config
from scheduler_svc.text.text_threads import TextThreads

if TYPE_CHECKING:
    from scheduler_svc.engine.engine import Engine

Context = grpc.aio.ServicerContext[Any, Any]

MAX_ABORTED_IDS: Final = 10_000


class InferenceService(inference_pb2_grpc.InferenceServicer):  # type: ignore[misc]
    def __init__(
        self, config: Config, engine: Engine, streams: LiveStreams, served: ServedModel
    ) -> None:
        self._config = config
        self._engine = engine
        self._streams = streams
        self._served = served
        self._threads = TextThreads()
        self._started = time.monotonic()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        check_request_id(request.request_id)
        n = num_siblings(request.sampling, self._config.max_requests_per_batch)
        request_id = request.request_id or uuid.uuid4().hex
        stream = self._streams.open(request_id, n, request.resume.index)
        try:
            async with _time_limit(self._config.request_timeout):
                is_streamed = request.stream or not request.HasField("stream")
                seed = await self._submit(request, stream, is_streamed)
                started = pb.Started(
                    request_id=stream.request_id, seed=seed, model=self._config.model_name
                )
                await context.write(pb.GenerateResponse(started=started))
                await (_write_deltas if is_streamed else _write_whole)(stream, context)
        finally:
            if stream.is_submitted and not stream.is_complete:
                self._engine.abort([stream.request_id])  # no effect if the request has failed
            self._streams.close(stream)

    async def _submit(
        self, request: pb.GenerateRequest, stream: LiveStream, is_streamed: bool
    ) -> int:
        """Waits for the model, validates the request, submits it and returns its seed. If it is
        aborted or refused meanwhile, it is not submitted."""
        if self._served.is_awaited:
            self._check_queue()
        model = await stream.unless_ended(self._served.wait())
        if model is None:
            return request.sampling.seed
        submission = await self._threads.run(
            prompt_bytes(request),
            validate,
            request,
            stream.request_id,
            secrets.randbits(63),
            model,
            self._config.max_requests_per_batch,
            is_streamed,
        )
        if not stream.has_ended:
            self._begin(stream, submission)
        return submission.new.sampling.seed

    def _begin(self, stream: LiveStream, submission: Submission) -> None:
        end = submission.end
        if end is None:
            self._engine.submit(submission)
            self._streams.mark_submitted(stream)
            return
        if submission.unsent_text:
            stream.put(Delta(end.request_id, end.index, [], submission.unsent_text))
        stream.put(end)

    def _check_queue(self) -> None:
        """Raises QueueFull. Called on arrival, so that each request counts those before it."""
        limit, num_waiting = self._config.max_queue_size, self._num_waiting() - 1  # but this one
        if 0 < limit <= num_waiting:
            raise QueueFull(num_waiting, limit)

    def _num_waiting(self) -> int:
        """Requests without a row: those in the engine's queue, and those not submitted yet."""
        return self._engine.status.num_waiting + len(self._streams.unsubmitted())

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        if len(request.request_ids) > MAX_ABORTED_IDS:
            raise RequestRejected(
                "number of request_ids", len(request.request_ids), f"at most {MAX_ABORTED_IDS}"
            )
        aborted: set[str] = set()
        in_engine: list[str] = []
        request_ids = list(dict.fromkeys(request.request_ids))
        for request_id in request_ids:
            stream = self._streams.get(request_id)
            if stream is not None and not stream.is_submitted and not stream.has_ended:
                stream.abort()
                aborted.add(request_id)
            else:
                in_engine.append(request_id)
        if in_engine:
            ended: list[str] = await asyncio.wrap_future(self._engine.abort(in_engine))
            aborted.update(ended)
        return pb.AbortResponse(aborted=[id for id in request_ids if id in aborted])

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
            requests_waiting=self._num_waiting(),
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


@asynccontextmanager
async def _time_limit(seconds: float) -> AsyncIterator[None]:
    """Raises DeadlineExceeded after `seconds`; 0 = no limit."""
    try:
        async with asyncio.timeout(seconds or None) as limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise DeadlineExceeded(seconds) from None
        raise


def _version() -> str:
    try:
        return importlib.metadata.version("chairlift")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


def _shown(value: object) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)
