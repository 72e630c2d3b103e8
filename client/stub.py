"""The client for ordinary Python code: `Chairlift`. Its asyncio twin is client/aio.py.

    with Chairlift("localhost:50051") as chairlift:
        for delta in chairlift.generate("Once upon a time", max_tokens=64):
            print(delta.text, end="", flush=True)

Every call can raise the errors of client/errors.py. Safe to share between threads; one stream
belongs to one thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
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


class TokenStream(Iterator[Delta]):
    """The deltas of one request, as they come; what has come so far stays readable.

    The request is already running. Leaving early cancels it, in whatever way: `cancel()`, the end
    of a `with`, or dropping the stream (a `break` out of `for … in chairlift.generate(…)`).
    """

    def __init__(self, call: Any, owner: Chairlift) -> None:
        self._call = call
        self._owner = owner  # the connection must not be collected while the stream is read
        self._transcript = Transcript()
        self._is_cancelled = False

    def __next__(self) -> Delta:
        while True:
            try:
                response = next(self._call)
            except grpc.RpcError as error:
                if self._is_cancelled:
                    raise StopIteration from None
                raise self._owner._translate(error) from None
            delta = self._transcript.absorb(response)
            if delta is not None:
                return delta

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
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

    def text(self, index: int = 0) -> str:
        """Reads to the end and gives the whole text of one sibling."""
        for _ in self:
            pass
        return self._transcript.text(index)

    def answers(self) -> list[Answer]:
        """Reads to the end and gives the answers of all siblings, by index."""
        for _ in self:
            pass
        return self._transcript.answers()


class Chairlift:
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
            grpc.insecure_channel(address, options=channel_options(address))
            if credentials is None
            else grpc.secure_channel(address, credentials, options=channel_options(address))
        )
        self._inference: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin: Any = admin_pb2_grpc.AdminStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; what still runs on it is cancelled."""
        self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        request_id: str = "",
        priority: int | None = None,
        cache_salt: str = "",
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> TokenStream:
        """Starts a request at once and streams its deltas.

        `prompt` is text, token ids, or chat messages (ChatMessage, or mappings with role and
        content), to which the model's chat template is applied.
        """
        request = generate_request(
            prompt, sampling, request_id=request_id, priority=priority, cache_salt=cache_salt
        )
        return TokenStream(self._inference.Generate(request, timeout=self._deadline(timeout)), self)

    def complete(
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
        return with_siblings(TokenStream(call, self).answers())

    def abort(self, *request_ids: str, timeout: float | None = None) -> list[str]:
        """Ends live requests, of any client, with finish_reason abort; which of them were live."""
        request = message(inference_pb2.AbortRequest, request_ids=request_ids)
        response: inference_pb2.AbortResponse = self._call(self._inference.Abort, request, timeout)
        return list(response.aborted)

    def tokenize(
        self,
        prompt: str | Chat,
        *,
        add_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """Token ids of a text, or of chat messages under the model's chat template."""
        request = tokenize_request(prompt, add_special_tokens)
        response: inference_pb2.TokenizeResponse = self._call(
            self._inference.Tokenize, request, timeout
        )
        return list(response.token_ids)

    def detokenize(
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
        response: inference_pb2.DetokenizeResponse = self._call(
            self._inference.Detokenize, request, timeout
        )
        return response.text

    def model_info(self, *, timeout: float | None = None) -> inference_pb2.GetModelInfoResponse:
        """What is served: protos/inference.proto describes the fields."""
        response: inference_pb2.GetModelInfoResponse = self._call(
            self._inference.GetModelInfo, inference_pb2.GetModelInfoRequest(), timeout
        )
        return response

    def server_info(self, *, timeout: float | None = None) -> inference_pb2.GetServerInfoResponse:
        """Version, readiness, load and every setting in effect."""
        response: inference_pb2.GetServerInfoResponse = self._call(
            self._inference.GetServerInfo, inference_pb2.GetServerInfoRequest(), timeout
        )
        return response

    def list_requests(
        self, *, state: str = "", limit: int = 0, timeout: float | None = None
    ) -> admin_pb2.ListRequestsResponse:
        """Live requests in arrival order; `state` empty means all, `limit` 0 the server's."""
        request = message(admin_pb2.ListRequestsRequest, state=state, limit=limit)
        response: admin_pb2.ListRequestsResponse = self._call(
            self._admin.ListRequests, request, timeout
        )
        return response

    def get_request(
        self, request_id: str, *, timeout: float | None = None
    ) -> admin_pb2.GetRequestResponse:
        """One live request with its tokens and block tables; NotFound if it is not live."""
        request = message(admin_pb2.GetRequestRequest, request_id=request_id)
        response: admin_pb2.GetRequestResponse = self._call(
            self._admin.GetRequest, request, timeout
        )
        return response

    def get_cache(self, *, timeout: float | None = None) -> admin_pb2.GetCacheResponse:
        """The KV pool: chunks, blocks, prefix hits, swap."""
        response: admin_pb2.GetCacheResponse = self._call(
            self._admin.GetCache, admin_pb2.GetCacheRequest(), timeout
        )
        return response

    def watch_steps(self) -> Iterator[admin_pb2.StepSummary]:
        """Returns once the server watches; then a summary of every step, until it is left."""
        call = self._admin.WatchSteps(admin_pb2.WatchStepsRequest())
        call.initial_metadata()
        return self._summaries(call)

    def _summaries(self, call: Any) -> Iterator[admin_pb2.StepSummary]:
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._translate(error) from None
        finally:
            call.cancel()

    def flush_cache(self, *, timeout: float | None = None) -> int:
        """Empties the prefix cache; how many blocks can no longer be found."""
        response: admin_pb2.FlushCacheResponse = self._call(
            self._admin.FlushCache, admin_pb2.FlushCacheRequest(), timeout
        )
        return response.blocks_flushed

    def is_ready(self, *, timeout: float | None = None) -> bool:
        """Whether a request would run now; False also where nobody answers within `timeout`, or
        within five seconds if none is given."""
        try:
            return self.server_info(timeout=self._deadline(timeout) or READY_SECONDS).is_ready
        except (Unavailable, DeadlineExceeded):
            return False

    def wait_ready(
        self,
        timeout: float | None = None,
        on_change: Callable[[str], None] | None = None,
    ) -> None:
        """Returns once a request would run; DeadlineExceeded after `timeout` seconds.

        A server that has not been started yet is waited for too. `on_change` is told what is
        being waited for, whenever that changes: unreachable, or the worker's state (none,
        connecting, loading), or why the model cannot be served.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        last = ""
        while True:
            left = math.inf if deadline is None else max(0.1, deadline - time.monotonic())
            try:
                info = self.server_info(timeout=min(READY_SECONDS, left))
                if info.is_ready:
                    return
                waiting_for = info.error or f"worker: {info.worker}"
            except (Unavailable, DeadlineExceeded):
                waiting_for = "unreachable"
            if waiting_for != last and on_change is not None:
                on_change(waiting_for)
            last = waiting_for
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"{self.address} is not ready after {timeout:g} s ({waiting_for})",
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                )
            time.sleep(READY_POLL_SECONDS)

    def _call(self, method: Any, request: object, timeout: float | None) -> Any:
        try:
            return method(request, timeout=self._deadline(timeout))
        except grpc.RpcError as error:
            raise self._translate(error) from None

    def _deadline(self, timeout: float | None) -> float | None:
        seconds = self.timeout if timeout is None else timeout
        return None if seconds is None else min(seconds, LONGEST_SECONDS)

    def _translate(self, error: Any) -> ChairliftError:
        return from_status(
            error.code(), error.details() or "", self.address, error.trailing_metadata() or ()
        )
