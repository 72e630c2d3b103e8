"""A real gRPC server with a fake engine behind it: the prompt says how it behaves.

    "count N"         streams N deltas, "w0 " to "wN-1 "; sibling 1 says "(1)w0 " and so on
    "forever"         streams until the client goes away
    "silent"          accepts, and sends nothing until the client goes away
    "fail STATUS …"   ends with that status; the rest is its sentence
    "broken STATUS …" one delta, then the same

Chat answers with "you said: " and the last message, which may be one of these too. Tokens answer
with the same tokens.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration

from protos import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

MODEL = "fake-model"
OPTIONS = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)]


@dataclass
class FakeEngine(inference_pb2_grpc.InferenceServicer, admin_pb2_grpc.AdminServicer):
    """What tests read: `requests` in order, their ids in `arrived`, and those whose call ended
    without an answer in `gone`."""

    is_ready: bool = True
    error: str = ""  # why it can never be
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    arrived: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    gone: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    timeouts: list[float | None] = field(default_factory=list)

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        request_id = request.request_id or f"made-{len(self.requests)}"
        self.requests.append(request)
        self.arrived.put(request_id)
        self.timeouts.append(context.time_remaining())
        ended, is_answered = threading.Event(), threading.Event()

        def end() -> None:
            ended.set()
            if not is_answered.is_set():
                self.gone.put(request_id)

        context.add_callback(end)
        kind = request.WhichOneof("prompt")
        said = request.chat.messages[-1].content if kind == "chat" else request.text
        command, _, rest = said.partition(" ")
        if command == "fail":
            fail(context, rest)
        if command == "silent":
            ended.wait(30)
            return
        yield inference_pb2.GenerateResponse(
            started=inference_pb2.Started(request_id=request_id, seed=7, model=MODEL)
        )
        if kind == "chat":
            words = ["you said: ", said]
        elif kind == "tokens":
            words = [f"<{token}>" for token in request.tokens.ids]
        elif command == "count":
            words = [f"w{number} " for number in range(int(rest))]
        else:
            words = ["once"]
        yield from interleaved(words, request)
        if command == "broken":
            fail(context, rest)
        if command == "forever":
            for number in itertools.count():
                if ended.wait(0.01):
                    return
                yield chunk(f"{number} ", [number], 0)
        is_answered.set()
        for index in range(request.sampling.n or 1):
            yield complete(index, len(words))

    def Abort(
        self, request: inference_pb2.AbortRequest, context: grpc.ServicerContext
    ) -> inference_pb2.AbortResponse:
        return inference_pb2.AbortResponse(aborted=request.request_ids[:1])

    def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        text = request.text or request.chat.messages[0].content
        return inference_pb2.TokenizeResponse(token_ids=text.encode())

    def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> inference_pb2.GetModelInfoResponse:
        return inference_pb2.GetModelInfoResponse(
            model=MODEL, architecture="FakeForCausalLM", dtype="float32", max_model_len=2048
        )

    def GetServerInfo(
        self, request: inference_pb2.GetServerInfoRequest, context: grpc.ServicerContext
    ) -> inference_pb2.GetServerInfoResponse:
        return inference_pb2.GetServerInfoResponse(
            version="0.1.0",
            uptime_seconds=3725,
            is_ready=self.is_ready,
            error=self.error,
            worker="ready" if self.is_ready else "loading",
            device="cpu",
            requests_running=2,
            requests_waiting=1,
        )

    def ListRequests(
        self, request: admin_pb2.ListRequestsRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ListRequestsResponse:
        summary = admin_pb2.RequestSummary(
            request_id="first",
            state="DECODING",
            prompt_tokens=5,
            completion_tokens=9,
            max_tokens=64,
        )
        sibling = admin_pb2.RequestSummary(
            request_id="first",
            index=1,
            state="PENDING",
            offloaded=True,
            prompt_tokens=5,
            completion_tokens=7,
            max_tokens=64,
        )
        return admin_pb2.ListRequestsResponse(requests=[summary, sibling], total=2)

    def GetRequest(
        self, request: admin_pb2.GetRequestRequest, context: grpc.ServicerContext
    ) -> admin_pb2.GetRequestResponse:
        if request.request_id != "first":
            context.abort(grpc.StatusCode.NOT_FOUND, f"no live request {request.request_id!r}")
        return admin_pb2.GetRequestResponse(row=3)

    def GetCache(
        self, request: admin_pb2.GetCacheRequest, context: grpc.ServicerContext
    ) -> admin_pb2.GetCacheResponse:
        return admin_pb2.GetCacheResponse(
            page_size=16,
            chunks_total=100,
            chunks_free=75,
            chunk_bytes=1 << 20,
            tokens_stored=1000,
            utilisation=0.97,
            groups=[
                admin_pb2.CacheGroup(group="full_attention", blocks_cached=30),
                admin_pb2.CacheGroup(group="sliding_attention", blocks_cached=10),
            ],
            prefix_queries=200,
            prefix_hits=50,
            swap_chunks_total=8,
            swap_chunks_free=6,
            offloads=3,
            restores=2,
            soft_resets=4,
        )

    def WatchSteps(
        self, request: admin_pb2.WatchStepsRequest, context: grpc.ServicerContext
    ) -> Iterator[admin_pb2.StepSummary]:
        context.send_initial_metadata(())
        for number in range(2):
            yield admin_pb2.StepSummary(
                step_id=number,
                num_decoding=3,
                start_seconds=1000.0 + number,
                seconds=0.5,
                chunks_free=25,
                chunks_total=100,
                missed=number,
            )

    def FlushCache(
        self, request: admin_pb2.FlushCacheRequest, context: grpc.ServicerContext
    ) -> admin_pb2.FlushCacheResponse:
        return admin_pb2.FlushCacheResponse(blocks_flushed=40)


def interleaved(
    words: list[str], request: inference_pb2.GenerateRequest
) -> Iterator[inference_pb2.GenerateResponse]:
    """The siblings' words by turns; each sibling after the first marks its own."""
    siblings = range(request.sampling.n or 1)
    marks = ["", *(f"({index})" for index in siblings[1:])]
    if request.HasField("stream") and not request.stream:
        for index in siblings:
            text = "".join(marks[index] + word for word in words)
            yield chunk(text, list(range(len(words))), index)
        return
    for number, word in enumerate(words):
        for index in siblings:
            yield chunk(marks[index] + word, [number], index)


def chunk(text: str, token_ids: list[int], index: int) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        index=index, chunk=inference_pb2.Chunk(text=text, token_ids=token_ids)
    )


def complete(index: int, num_tokens: int) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        index=index,
        complete=inference_pb2.Complete(
            finish_reason="stop",
            stop_token_id=2,
            usage=inference_pb2.Usage(prompt_tokens=3, completion_tokens=num_tokens),
            timing=inference_pb2.Timing(decode_seconds=0.5),
        ),
    )


def fail(context: grpc.ServicerContext, order: str) -> None:
    status, _, sentence = order.partition(" ")
    if status == "RESOURCE_EXHAUSTED":
        # google.rpc.Status { details: RetryInfo { retry_delay: 2.5 s } }, framed by hand
        delay = Duration(seconds=2, nanos=500_000_000).SerializeToString()
        info = AnyMessage(
            type_url="type.googleapis.com/google.rpc.RetryInfo",
            value=bytes([0x0A, len(delay)]) + delay,
        ).SerializeToString()
        details = bytes([0x08, 8, 0x1A, len(info)]) + info
        context.set_trailing_metadata([("grpc-status-details-bin", details)])
    context.abort(grpc.StatusCode[status], sentence)


def start(engine: FakeEngine, port: int = 0) -> tuple[Any, str]:
    """A listening server and its address."""
    server = grpc.server(ThreadPoolExecutor(16), options=OPTIONS)
    inference_pb2_grpc.add_InferenceServicer_to_server(engine, server)
    admin_pb2_grpc.add_AdminServicer_to_server(engine, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, f"127.0.0.1:{port}"
