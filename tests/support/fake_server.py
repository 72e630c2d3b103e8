"""A real gRPC server with a fake engine behind it: the prompt says how it behaves.

    "count N"         streams N deltas, "w0 " to "wN-1 "; sibling 1 says "(1)w0 " and so on
    "uneven N"        the same, and sibling i says i words more
    "spell TEXT"      each byte a token, so that a character may take several
    "rank N"          N hypotheses of a beam search, each as a whole with its score
    "forever"         streams until the client goes away
    "silent"          accepts, and sends nothing until the client goes away
    "fail STATUS …"   ends with that status; the rest is its sentence
    "broken STATUS …" one delta, then the same

Chat answers with "you said: " and the last message, which may be one of these too. Tokens answer
with the same tokens. `FakeEngine.losses` says after how many responses each call is lost; `resume`
is answered as the protocol promises, and refused where it contradicts the answer.
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
    losses: list[int | None] = field(default_factory=list)  # of the calls to come; then none
    loss: str = "UNAVAILABLE the server is restarting"
    live: set[str] = field(default_factory=set)  # ids that may not be used
    _lock: Any = field(default_factory=threading.Lock)

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        with self._lock:
            request_id = request.request_id or f"made-{len(self.requests)}"
            self.requests.append(request)
            loss = self.losses.pop(0) if self.losses else None
        if request_id in self.live:
            fail(context, f"ALREADY_EXISTS {request_id!r} is live")
        for number, response in enumerate(self._answer(request, request_id, context)):
            if number == loss:
                fail(context, self.loss)
            yield response
        if loss is not None:
            fail(context, self.loss)

    def _answer(
        self,
        request: inference_pb2.GenerateRequest,
        request_id: str,
        context: grpc.ServicerContext,
    ) -> Iterator[inference_pb2.GenerateResponse]:
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
        if command == "rank":
            yield from hypotheses(int(rest))
            is_answered.set()
            return
        if kind == "chat":
            words = ["you said: ", said]
        elif kind == "tokens":
            words = [f"<{token}>" for token in request.tokens.ids]
        elif command in ("count", "uneven"):
            words = [f"w{number} " for number in range(int(rest))]
        elif command == "spell":
            words = spelled(rest)
        else:
            words = ["once"]
        answers = siblings_of(request, words, grows=command == "uneven")
        check_resume(request, answers, context)
        yield from responses(request, answers, ends=command not in ("broken", "forever"))
        if command == "broken":
            fail(context, rest)
        if command == "forever":
            for number in itertools.count():
                if ended.wait(0.01):
                    return
                yield chunk(f"{number} ", [number], 0)
        is_answered.set()

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
            drafted_tokens=80,
            accepted_tokens=60,
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


def spelled(text: str) -> list[str]:
    """What each byte of a text lets a client see: a character with its last byte."""
    return [part for char in text for part in [""] * (len(char.encode()) - 1) + [char]]


def siblings_of(
    request: inference_pb2.GenerateRequest, words: list[str], grows: bool
) -> dict[int, list[str]]:
    """The words of each sibling asked for; each after the first marks its own."""
    resumed = [request.resume.index] if request.HasField("resume") else None
    answers = {}
    for index in resumed or range(request.sampling.n or 1):
        more = [f"w{len(words) + number} " for number in range(index)] if grows else []
        answers[index] = [f"({index})" * bool(index) + word for word in [*words, *more]]
    return answers


def check_resume(
    request: inference_pb2.GenerateRequest,
    answers: dict[int, list[str]],
    context: grpc.ServicerContext,
) -> None:
    """Refuses a `resume` that is not what this server said before."""
    if not request.HasField("resume"):
        return
    resume = request.resume
    given = answers[resume.index][: len(resume.output_token_ids)]
    expected = (list(range(len(given))), len("".join(given)), 7, 0)
    sent = (
        list(resume.output_token_ids),
        resume.text_length,
        request.sampling.seed,
        request.sampling.n,
    )
    if sent != expected:
        fail(context, f"INVALID_ARGUMENT resume is {sent}; expected: {expected}")


def responses(
    request: inference_pb2.GenerateRequest, answers: dict[int, list[str]], ends: bool
) -> Iterator[inference_pb2.GenerateResponse]:
    """The siblings' words by turns, without those of `resume`; each ends after its last word."""
    skipped = len(request.resume.output_token_ids)
    has_logprobs = request.sampling.HasField("logprobs")
    if request.HasField("stream") and not request.stream:
        for index, words in answers.items():
            numbers = list(range(skipped, len(words)))
            yield chunk("".join(words[skipped:]), numbers, index, has_logprobs)
            yield complete(index, len(words))
        return
    for number in range(skipped, max(map(len, answers.values())) + 1):
        for index, words in answers.items():
            if number < len(words):
                response = chunk(words[number], [number], index, has_logprobs)
                if number == 0 and request.sampling.HasField("prompt_logprobs"):
                    response.chunk.prompt_logprobs.append(logprob(100))
                yield response
            elif number == max(skipped, len(words)) and ends:
                yield complete(index, len(words))


def hypotheses(count: int) -> Iterator[inference_pb2.GenerateResponse]:
    """Each hypothesis as one chunk, then its end."""
    for index in range(count):
        yield chunk(f"hypothesis {index}", [index, index], index)
        end = complete(index, 2)
        end.complete.beam_score = -1.5 - index
        yield end


def logprob(token_id: int) -> inference_pb2.TokenLogprobs:
    top = [inference_pb2.Candidate(token_id=token_id, logprob=-0.5)]
    return inference_pb2.TokenLogprobs(token_id=token_id, logprob=-0.5, rank=1, top=top)


def chunk(
    text: str, token_ids: list[int], index: int, has_logprobs: bool = False
) -> inference_pb2.GenerateResponse:
    sent = inference_pb2.Chunk(text=text, token_ids=token_ids)
    sent.logprobs.extend(logprob(token) for token in token_ids if has_logprobs)
    return inference_pb2.GenerateResponse(index=index, chunk=sent)


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
