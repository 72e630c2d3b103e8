"""The life of a request in the API's event loop: validated, submitted, read, aborted if abandoned.

A request waits for a row in the engine's queue, which holds token ids; until the model's tokenizer
is loaded there are none, so it waits here, in its handler. Both count towards max_queue_size.

However a handler ends (the client cancels, disconnects or times out, or a write fails), the request
is aborted if it is still live.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from protos import inference_pb2 as pb
from scheduler_svc.engine.events import Delta, Submission
from scheduler_svc.errors import DeadlineExceeded, QueueFull, RequestRejected
from scheduler_svc.front.prompts import prompt_bytes
from scheduler_svc.front.served_model import ServedModel
from scheduler_svc.front.streams import LiveStream, LiveStreams
from scheduler_svc.front.validation import check_request_id, num_siblings, validate
from scheduler_svc.settings.config import Config
from scheduler_svc.text.text_threads import TextThreads

if TYPE_CHECKING:
    from scheduler_svc.engine.engine import Engine

MAX_ABORTED_IDS: Final = 10_000


class Generations:
    """Runs requests, for every service that generates."""

    def __init__(
        self, config: Config, engine: Engine, streams: LiveStreams, served: ServedModel
    ) -> None:
        self.threads = TextThreads()
        self._config = config
        self._engine = engine
        self._streams = streams
        self._served = served

    @property
    def num_waiting(self) -> int:
        """Requests without a row: those in the engine's queue, and those not submitted yet."""
        return self._engine.status.num_waiting + len(self._streams.unsubmitted())

    @asynccontextmanager
    async def run(
        self, request: pb.GenerateRequest, is_streamed: bool
    ) -> AsyncIterator[tuple[LiveStream, int]]:
        """The request's stream, once it is accepted, and its seed. Raises ChairliftError."""
        check_request_id(request.request_id)
        n = num_siblings(request.sampling, self._config.max_requests_per_batch)
        request_id = request.request_id or uuid.uuid4().hex
        stream = self._streams.open(request_id, n, request.resume.index)
        try:
            async with _time_limit(self._config.request_timeout):
                seed = await self._submit(request, stream, is_streamed)
                yield stream, seed
        finally:
            if stream.is_submitted and not stream.is_complete:
                self._engine.abort([stream.request_id])  # no effect if the request has failed
            self._streams.close(stream)

    async def abort(self, request_ids: Sequence[str]) -> list[str]:
        """Ends live requests; returns the ids of those that were, in the order given."""
        if len(request_ids) > MAX_ABORTED_IDS:
            raise RequestRejected(
                "number of request_ids", len(request_ids), f"at most {MAX_ABORTED_IDS}"
            )
        aborted: set[str] = set()
        in_engine: list[str] = []
        wanted = list(dict.fromkeys(request_ids))
        for request_id in wanted:
            stream = self._streams.get(request_id)
            if stream is not None and not stream.is_submitted and not stream.has_ended:
                stream.abort()
                aborted.add(request_id)
            else:
                in_engine.append(request_id)
        if in_engine:
            ended: list[str] = await asyncio.wrap_future(self._engine.abort(in_engine))
            aborted.update(ended)
        return [request_id for request_id in wanted if request_id in aborted]

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
        submission = await self.threads.run(
            prompt_bytes(request),
            validate,
            request,
            stream.request_id,
            secrets.randbits(63),
            model,
            self._config.max_requests_per_batch,
            is_streamed,
        )
        stream.prompt_token_ids = submission.new.prompt_token_ids
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
        limit, num_waiting = self._config.max_queue_size, self.num_waiting - 1  # but this one
        if 0 < limit <= num_waiting:
            raise QueueFull(num_waiting, limit)


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
