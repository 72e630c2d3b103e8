"""The client for blocking code: `Chairlift`.

    with Chairlift("localhost:50051") as chairlift:
        for delta in chairlift.generate("Once upon a time", max_tokens=64):
            print(delta.text, end="", flush=True)

Every call may raise the errors of client/errors.py. Threads may share a client;
a stream belongs to one thread.
"""

# Generated from client/aio.py by `make protos`: edit that file.

from __future__ import annotations

from time import sleep
from collections.abc import Iterator, Callable, Iterable, Sequence
from time import monotonic
from typing import Any, Self, Unpack

import grpc

from client.blocking_stream import TokenStream
from client.answers import Answer, with_siblings
from client.chat_messages import Chat, ChatOptions
from client.connection import (
    DEFAULT_ADDRESS,
    MAX_DEADLINE_SECONDS,
    READY_POLL_SECONDS,
    READY_SECONDS,
    open_channel,
)
from client.errors import ChairliftError, DeadlineExceeded, Unavailable, from_rpc_error
from client.fields import message
from client.mapping import DEFAULT_CONCURRENCY, MapProgress, ordered_answers
from client.messages import (
    GenerateOptions,
    Prompt,
    check_options,
    generate_request,
    tokenize_request,
)
from client.resuming import DEFAULT_RETRIES
from protos import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc


class Chairlift:
    """A connection to one server. Nothing is sent before the first call.

    `timeout` (seconds) is the default deadline of every call; None means no deadline. `retries`
    bounds how often in a row a request is tried again, or resumed, without success while the server
    is away or full, with pauses that grow to 5 s; 0 makes the first loss an error. `address` is a
    gRPC target: "host:port", "dns:///host:port" or "unix:path".
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float | None = None,
        retries: int = DEFAULT_RETRIES,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.address = address
        self.timeout = timeout
        self.retries = retries
        self._channel = open_channel(address, credentials)
        self._inference: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin: Any = admin_pb2_grpc.AdminStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and cancels all calls in progress."""
        self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        request_id: str = "",
        priority: int | None = None,
        cache_salt: str = "",
        timeout: float | None = None,
        retries: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> TokenStream:
        """Sends a request at once, before the stream is first read, and streams its deltas.

        `prompt` is text, token ids, or chat messages (ChatMessage, or mappings in the shape of
        OpenAI's API), to which the model's chat template is applied. A `request_id` must not be the
        id of a live request; lower `priority` runs first; requests share cached prefixes only under
        the same `cache_salt`. `timeout` covers the whole answer, with all its retries. TypeError or
        ValueError if an argument does not fit its field.
        """
        request = generate_request(
            prompt, options, request_id=request_id, priority=priority, cache_salt=cache_salt
        )
        return self._stream(request, retries, timeout)

    def complete(
        self,
        prompt: Prompt,
        *,
        request_id: str = "",
        priority: int | None = None,
        cache_salt: str = "",
        timeout: float | None = None,
        retries: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Answer:
        """The whole answer in one message; arguments as in `generate`.

        With n > 1 it is the first answer, and the others are its `siblings`.
        """
        request = generate_request(
            prompt,
            options,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            stream=False,
        )
        return with_siblings(self._stream(request, retries, timeout).answers())

    def map(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        on_progress: Callable[[MapProgress], None] | None = None,
        priority: int | None = None,
        cache_salt: str = "",
        timeout: float | None = None,
        retries: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[Answer | ChairliftError]:
        """Answers to many prompts, in their order, each as soon as it and those before it are
        ready; up to `concurrency` requests run at once.

        An item that fails is its error, and does not stop the others. `prompts` may be a generator
        of any length: no more is held than a few times `concurrency`. `timeout` is that of each
        request. Leaving the loop early cancels what runs.
        """
        check_options(options, priority=priority, cache_salt=cache_salt)

        def start(prompt: Prompt) -> TokenStream:
            request = generate_request(
                prompt, options, priority=priority, cache_salt=cache_salt, stream=False
            )
            return self._stream(request, retries, timeout)

        return ordered_answers(start, prompts, concurrency, on_progress)

    def _stream(
        self,
        request: inference_pb2.GenerateRequest,
        retries: int | None,
        timeout: float | None,
    ) -> TokenStream:
        retries = self.retries if retries is None else retries
        return TokenStream(
            self._start, self.address, request, retries, self._deadline(timeout)
        )

    def _start(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> Any:
        return self._inference.Generate(request, timeout=timeout)

    def abort(self, *request_ids: str, timeout: float | None = None) -> list[str]:
        """Ends live requests of any client with finish_reason "abort"; returns the ids that were
        live."""
        request = message(inference_pb2.AbortRequest, request_ids=request_ids)
        return list((self._call(self._inference.Abort, request, timeout)).aborted)

    def tokenize(
        self,
        prompt: str | Chat,
        *,
        add_special_tokens: bool | None = None,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[int]:
        """Token ids of a text, or of chat messages under the model's chat template."""
        request = tokenize_request(prompt, add_special_tokens, options)
        return list((self._call(self._inference.Tokenize, request, timeout)).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> str:
        """The text of token ids; special tokens are skipped by default."""
        request = message(
            inference_pb2.DetokenizeRequest,
            token_ids=token_ids,
            skip_special_tokens=skip_special_tokens,
        )
        return str((self._call(self._inference.Detokenize, request, timeout)).text)

    def model_info(
        self, *, timeout: float | None = None
    ) -> inference_pb2.GetModelInfoResponse:
        """The served model; protos/inference.proto describes the fields."""
        response: inference_pb2.GetModelInfoResponse = self._call(
            self._inference.GetModelInfo, inference_pb2.GetModelInfoRequest(), timeout
        )
        return response

    def server_info(
        self, *, timeout: float | None = None
    ) -> inference_pb2.GetServerInfoResponse:
        """Version, readiness, load and every setting in effect."""
        response: inference_pb2.GetServerInfoResponse = self._call(
            self._inference.GetServerInfo, inference_pb2.GetServerInfoRequest(), timeout
        )
        return response

    def list_requests(
        self, *, state: str = "", limit: int = 0, timeout: float | None = None
    ) -> admin_pb2.ListRequestsResponse:
        """Live requests in arrival order. An empty `state` means all states, `limit` 0 the
        server's default."""
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
        """The KV pool: chunks, blocks, prefix cache hits, swap space."""
        response: admin_pb2.GetCacheResponse = self._call(
            self._admin.GetCache, admin_pb2.GetCacheRequest(), timeout
        )
        return response

    def watch_steps(self) -> Iterator[admin_pb2.StepSummary]:
        """Subscribes to the server's steps, and returns once the subscription is active; then
        yields a summary of each step until the iterator is closed."""
        call = self._admin.WatchSteps(admin_pb2.WatchStepsRequest())
        call.initial_metadata()
        return self._summaries(call)

    def _summaries(self, call: Any) -> Iterator[admin_pb2.StepSummary]:
        try:
            for summary in call:
                yield summary
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from None
        finally:
            call.cancel()

    def flush_cache(self, *, timeout: float | None = None) -> int:
        """Empties the prefix cache; returns the number of blocks removed from it."""
        request = admin_pb2.FlushCacheRequest()
        return int((self._call(self._admin.FlushCache, request, timeout)).blocks_flushed)

    def is_ready(self, *, timeout: float | None = None) -> bool:
        """Whether a request would run now; False also if the server does not answer within
        `timeout` seconds (default: 5)."""
        try:
            info = self.server_info(timeout=self._deadline(timeout) or READY_SECONDS)
        except (Unavailable, DeadlineExceeded):
            return False
        return info.is_ready

    def wait_ready(
        self,
        timeout: float | None = None,
        on_change: Callable[[str], None] | None = None,
    ) -> None:
        """Returns once a request would run; DeadlineExceeded after `timeout` seconds.

        The server need not be running yet. `on_change` is called with the reason for waiting
        whenever it changes: "unreachable", the worker's state ("worker: loading", …), or why the
        model cannot be served.
        """
        deadline = None if timeout is None else monotonic() + timeout
        reason = ""
        while True:
            remaining = READY_SECONDS if deadline is None else deadline - monotonic()
            last, reason = reason, self._obstacle(min(READY_SECONDS, max(0.1, remaining)))
            if not reason:
                return
            if reason != last and on_change is not None:
                on_change(reason)
            if deadline is not None and monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"{self.address} is not ready after {timeout:g} s ({reason})",
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                )
            sleep(READY_POLL_SECONDS)

    def _obstacle(self, timeout: float) -> str:
        """Why no request would run now; empty if one would."""
        try:
            info = self.server_info(timeout=timeout)
        except (Unavailable, DeadlineExceeded):
            return "unreachable"
        return "" if info.is_ready else info.error or f"worker: {info.worker}"

    def _call(self, method: Any, request: object, timeout: float | None) -> Any:
        try:
            return method(request, timeout=self._deadline(timeout))
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from None

    def _deadline(self, timeout: float | None) -> float | None:
        seconds = self.timeout if timeout is None else timeout
        return None if seconds is None else min(seconds, MAX_DEADLINE_SECONDS)
