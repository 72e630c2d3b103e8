"""The client for asyncio: `AsyncChairlift`, the twin of client/stub.py with the same names.

    async with AsyncChairlift("localhost:50051") as chairlift:
        async for delta in chairlift.generate("Once upon a time", max_tokens=64):
            print(delta.text, end="", flush=True)

Create it inside a running event loop. Cancelling the task that reads a stream cancels its request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from client.answers import (
    Answer,
    Completion,
    Delta,
    Started,
    Transcript,
    Usage,
    with_siblings,
)
from client.connection import (
    DEFAULT_ADDRESS,
    LONGEST_SECONDS,
    READY_POLL_SECONDS,
    READY_SECONDS,
    channel_options,
)
from client.errors import ChairliftError, DeadlineExceeded, Unavailable, from_status
from client.requests import (
    Chat,
    Prompt,
    SamplingOptions,
    generate_request,
    message,
    tokenize_request,
)
from protos import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc


class AsyncTokenStream(AsyncIterator[Delta]):
    """The deltas of one request, as they come; what has come so far stays readable.

    The request is already running. Leaving early cancels it, in whatever way: `cancel()`, the end
    of an `async with`, cancelling the reading task, or dropping the stream (a `break`).
    """

    def __init__(self, call: Any, owner: AsyncChairlift) -> None:
        self._call = call
        self._owner = owner
        self._transcript = Transcript()
        self._is_cancelled = False

    async def __anext__(self) -> Delta:
        while True:
            try:
                response = await self._call.read()
            except grpc.RpcError as error:
                raise self._owner._translate(error) from None
            except asyncio.CancelledError:
                if self._is_cancelled and not _is_being_cancelled():
                    raise StopAsyncIteration from None  # by our own cancel(), not the task's
                self._call.cancel()
                raise
            if response is grpc.aio.EOF:
                raise StopAsyncIteration
            delta = self._transcript.absorb(response)
            if delta is not None:
                return delta

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        # With its loop closed nothing is left to cancel.
        with contextlib.suppress(RuntimeError):
            self.cancel()

    def cancel(self) -> None:
        """Aborts the request; iteration ends. Does nothing once it has ended."""
        self._is_cancelled = True
        self._call.cancel()

    @property
    def started(self) -> Started | None:
        """What the server decided; None until its first response has been read."""
        return self._transcript.started

    @property
    def completions(self) -> dict[int, Completion]:
        """How each sibling ended, for those that have."""
        return self._transcript.completions

    @property
    def finish_reason(self) -> str | None:
        """Of the first sibling; None while it runs."""
        completion = self.completions.get(0)
        return completion.finish_reason if completion else None

    @property
    def usage(self) -> Usage | None:
        """Of the first sibling; None while it runs."""
        completion = self.completions.get(0)
        return completion.usage if completion else None

    async def text(self, index: int = 0) -> str:
        """Reads to the end and gives the whole text of one sibling."""
        async for _ in self:
            pass
        return self._transcript.text(index)

    async def answers(self) -> list[Answer]:
        """Reads to the end and gives the answers of all siblings, by index."""
        async for _ in self:
            pass
        return self._transcript.answers()


class AsyncChairlift:
    """A connection to one server. Nothing is sent before the first call.

    `timeout` (seconds) holds for every call that gives none; None means no deadline.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.address = address
        self.timeout = timeout
        self._channel = (
            grpc.aio.insecure_channel(address, options=channel_options(address))
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, options=channel_options(address))
        )
        self._inference: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin: Any = admin_pb2_grpc.AdminStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection; what still runs on it is cancelled."""
        await self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        request_id: str = "",
        priority: int | None = None,
        cache_salt: str = "",
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncTokenStream:
        """Starts a request at once (no await needed) and streams its deltas.

        `prompt` is text, token ids, or chat messages (ChatMessage, or mappings with role and
        content), to which the model's chat template is applied.
        """
        request = generate_request(
            prompt, sampling, request_id=request_id, priority=priority, cache_salt=cache_salt
        )
        call = self._inference.Generate(request, timeout=self._deadline(timeout))
        return AsyncTokenStream(call, self)

    async def complete(
        self,
        prompt: Prompt,
        *,
        request_id: str = "",
        priority: int | None = None,
        cache_salt: str = "",
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Answer:
        """The whole answer in one piece, for code that shows no progress.

        With n > 1 it is the first of them; the others are its `siblings`.
        """
        request = generate_request(
            prompt,
            sampling,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            stream=False,
        )
        call = self._inference.Generate(request, timeout=self._deadline(timeout))
        return with_siblings(await AsyncTokenStream(call, self).answers())

    async def abort(self, *request_ids: str, timeout: float | None = None) -> list[str]:
        """Ends live requests, of any client, with finish_reason abort; which of them were live."""
        request = message(inference_pb2.AbortRequest, request_ids=request_ids)
        return list((await self._call(self._inference.Abort, request, timeout)).aborted)

    async def tokenize(
        self,
        prompt: str | Chat,
        *,
        add_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """Token ids of a text, or of chat messages under the model's chat template."""
        request = tokenize_request(prompt, add_special_tokens)
        return list((await self._call(self._inference.Tokenize, request, timeout)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> str:
        """The text of token ids."""
        request = message(
            inference_pb2.DetokenizeRequest,
            token_ids=token_ids,
            skip_special_tokens=skip_special_tokens,
        )
        response: inference_pb2.DetokenizeResponse = await self._call(
            self._inference.Detokenize, request, timeout
        )
        return response.text

    async def model_info(
        self, *, timeout: float | None = None
    ) -> inference_pb2.GetModelInfoResponse:
        """What is served: protos/inference.proto describes the fields."""
        request = inference_pb2.GetModelInfoRequest()
        response: inference_pb2.GetModelInfoResponse = await self._call(
            self._inference.GetModelInfo, request, timeout
        )
        return response

    async def server_info(
        self, *, timeout: float | None = None
    ) -> inference_pb2.GetServerInfoResponse:
        """Version, readiness, load and every setting in effect."""
        request = inference_pb2.GetServerInfoRequest()
        response: inference_pb2.GetServerInfoResponse = await self._call(
            self._inference.GetServerInfo, request, timeout
        )
        return response

    async def list_requests(
        self, *, state: str = "", limit: int = 0, timeout: float | None = None
    ) -> admin_pb2.ListRequestsResponse:
        """Live requests in arrival order; `state` empty means all, `limit` 0 the server's."""
        request = message(admin_pb2.ListRequestsRequest, state=state, limit=limit)
        response: admin_pb2.ListRequestsResponse = await self._call(
            self._admin.ListRequests, request, timeout
        )
        return response

    async def get_request(
        self, request_id: str, *, timeout: float | None = None
    ) -> admin_pb2.GetRequestResponse:
        """One live request with its tokens and block tables; NotFound if it is not live."""
        request = message(admin_pb2.GetRequestRequest, request_id=request_id)
        response: admin_pb2.GetRequestResponse = await self._call(
            self._admin.GetRequest, request, timeout
        )
        return response

    async def get_cache(self, *, timeout: float | None = None) -> admin_pb2.GetCacheResponse:
        """The KV pool: chunks, blocks, prefix hits, swap."""
        response: admin_pb2.GetCacheResponse = await self._call(
            self._admin.GetCache, admin_pb2.GetCacheRequest(), timeout
        )
        return response

    async def watch_steps(self) -> AsyncIterator[admin_pb2.StepSummary]:
        """Returns once the server watches; then a summary of every step, until it is left."""
        call = self._admin.WatchSteps(admin_pb2.WatchStepsRequest())
        await call.initial_metadata()
        return self._summaries(call)

    async def _summaries(self, call: Any) -> AsyncIterator[admin_pb2.StepSummary]:
        try:
            async for summary in call:
                yield summary
        except grpc.RpcError as error:
            raise self._translate(error) from None
        finally:
            call.cancel()

    async def flush_cache(self, *, timeout: float | None = None) -> int:
        """Empties the prefix cache; how many blocks can no longer be found."""
        response: admin_pb2.FlushCacheResponse = await self._call(
            self._admin.FlushCache, admin_pb2.FlushCacheRequest(), timeout
        )
        return response.blocks_flushed

    async def is_ready(self, *, timeout: float | None = None) -> bool:
        """Whether a request would run now; False also where nobody answers within `timeout`, or
        within five seconds if none is given."""
        try:
            info = await self.server_info(timeout=self._deadline(timeout) or READY_SECONDS)
        except (Unavailable, DeadlineExceeded):
            return False
        return info.is_ready

    async def wait_ready(
        self,
        timeout: float | None = None,
        on_change: Callable[[str], None] | None = None,
    ) -> None:
        """Returns once a request would run; DeadlineExceeded after `timeout` seconds.

        A server that has not been started yet is waited for too. `on_change` is told what is
        being waited for, whenever that changes: unreachable, or the worker's state (none,
        connecting, loading), or why the model cannot be served.
        """
        last = "nothing asked yet"
        try:
            async with asyncio.timeout(timeout):
                while True:
                    waiting_for = await self._obstacle()
                    if waiting_for is None:
                        return
                    if waiting_for != last and on_change is not None:
                        on_change(waiting_for)
                    last = waiting_for
                    await asyncio.sleep(READY_POLL_SECONDS)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.address} is not ready after {timeout:g} s ({last})",
                grpc.StatusCode.DEADLINE_EXCEEDED,
            ) from None

    async def _obstacle(self) -> str | None:
        try:
            info = await self.server_info(timeout=READY_SECONDS)
        except (Unavailable, DeadlineExceeded):
            return "unreachable"
        return None if info.is_ready else info.error or f"worker: {info.worker}"

    async def _call(self, method: Any, request: object, timeout: float | None) -> Any:
        try:
            return await method(request, timeout=self._deadline(timeout))
        except grpc.RpcError as error:
            raise self._translate(error) from None

    def _deadline(self, timeout: float | None) -> float | None:
        seconds = self.timeout if timeout is None else timeout
        return None if seconds is None else min(seconds, LONGEST_SECONDS)

    def _translate(self, error: Any) -> ChairliftError:
        return from_status(
            error.code(), error.details() or "", self.address, error.trailing_metadata() or ()
        )


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
