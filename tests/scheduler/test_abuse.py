"""Odd and enormous calls over a real connection: each gets its own answer, nobody else's time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from protos import admin_pb2
from protos import inference_pb2 as pb
from scheduler_svc.errors import RequestRejected
from scheduler_svc.front.generations import MAX_ABORTED_IDS
from scheduler_svc.front.prompts import MAX_CONVERTED_TOKENS
from scheduler_svc.front.statuses import MAX_REQUEST_BYTES
from scheduler_svc.settings.config import Config
from scheduler_svc.text.tokenizer import Tokenizer
from tests.support.calls import generate, read_all, says, status_of, text_of
from tests.support.edge import Edge, stop
from tests.support.fake_engine import FACTS

INVALID = grpc.StatusCode.INVALID_ARGUMENT
MEGABYTE = 1 << 20


def text(text: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text)


def chat(*contents: str) -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role="user", content=content) for content in contents]
    return pb.GenerateRequest(chat=pb.ChatMessages(messages=messages))


def tokens(*token_ids: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(tokens=pb.TokenIds(ids=token_ids))


LONG: dict[str, tuple[Callable[[], pb.GenerateRequest], str]] = {
    "text": (
        lambda: text("x" * 8 * MEGABYTE),
        "length of text in bytes is 8388608; allowed: at most 1524",
    ),
    "message": (
        lambda: chat("x" * 8 * MEGABYTE),
        "length of chat.messages in bytes is 8388608; allowed: at most 1524",
    ),
    "messages": (lambda: chat(*["x" * 100] * 100), "length of chat.messages in bytes is 10000"),
    "many messages": (
        lambda: chat(*[""] * 128),
        "length of chat.messages is 128; allowed: at most 127",
    ),
    "ids": (
        lambda: tokens(*[1] * MEGABYTE),
        "length of the prompt in tokens is 1048576; allowed: at most 127",
    ),
    "huge text": (
        lambda: text("x" * MAX_REQUEST_BYTES),
        f"length of the request in bytes is 16777221; allowed: at most {MAX_REQUEST_BYTES}",
    ),
}


@pytest.mark.parametrize("kind", LONG)
async def test_a_long_prompt_is_refused_before_it_is_read(
    edge: Edge, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Eight texts of 8 MB took 4.8 GB and stopped the scheduler for 45 s."""

    def encode(*args: Any) -> Any:
        raise AssertionError("tokenised")

    monkeypatch.setattr(Tokenizer, "_encode_all", encode)
    make, told = LONG[kind]
    code, details = await status_of(edge.inference.Generate(make()))
    assert code == INVALID
    assert told in details


async def test_tokenize_and_detokenize_have_a_limit(edge: Edge) -> None:
    """60 MB of text to Tokenize took 8.5 GB."""
    most = MAX_CONVERTED_TOKENS
    stub = edge.inference
    fits = await stub.Tokenize(pb.TokenizeRequest(text="x" * 1000))
    assert len(fits.token_ids) == 1000, "more than the context: to count tokens is what it is for"
    code, details = await status_of(stub.Tokenize(pb.TokenizeRequest(text="x" * (12 * most + 1))))
    assert (code, f"{most} tokens in one call" in details) == (INVALID, True), details
    code, details = await status_of(stub.Tokenize(pb.TokenizeRequest(text="x" * 2 * most)))
    assert (code, f"at most {most} in one call" in details) == (INVALID, True), details
    asked = pb.DetokenizeRequest(token_ids=[1] * (most + 1))
    code, details = await status_of(stub.Detokenize(asked))
    assert (code, f"at most {most} in one call" in details) == (INVALID, True), details


async def test_ids_of_any_length_are_unknown(edge: Edge) -> None:
    """A status that quotes 20 KB breaks gRPC's limit on metadata: RESOURCE_EXHAUSTED."""
    edge.engine.answers["get_request"] = {}
    for request_id in ("x" * 20_000, "ü" * 9_000, "\x00" * 50_000):
        asked = admin_pb2.GetRequestRequest(request_id=request_id)
        code, details = await status_of(edge.admin.GetRequest(asked))
        assert code == grpc.StatusCode.NOT_FOUND
        assert "no live request has the id" in details


async def test_a_long_reason_is_cut(edge: Edge) -> None:
    """A template may quote the message that it refuses."""
    edge.engine.script = lambda engine, submission: engine.fail(
        submission.new.request_id, RequestRejected("chat", "x", "€" * 20_000)
    )
    code, details = await status_of(generate(edge))
    assert code == INVALID
    assert details.startswith("chat is 'x'; allowed: €")
    assert details.endswith("…")


async def test_abort_of_too_many(edge: Edge) -> None:
    """Each id is looked up in the engine's thread."""
    asked = pb.AbortRequest(request_ids=["x"] * (MAX_ABORTED_IDS + 1))
    code, details = await status_of(edge.inference.Abort(asked))
    assert (code, "number of request_ids is 10001" in details) == (INVALID, True)


async def test_a_message_that_is_none(edge: Edge) -> None:
    """A client of another protocol version learns that its message is the trouble."""
    call = edge.channel.unary_unary("/chairlift.v1.Inference/Tokenize")
    code, details = await status_of(call(b"\xff\xff\xff"))
    assert (code, "a protobuf message" in details) == (INVALID, True)


@pytest.mark.parametrize("kind", ["text", "chat", "tokens", "Tokenize"])
async def test_tokens_past_the_embedding(make_edge: Any, config: Config, kind: str) -> None:
    """Gemma 3's tokenizer knows one: its lookup failed the step, and all who were in it."""
    edge = await make_edge(config, is_ready=False)
    edge.engine.become_ready(replace(FACTS, num_embeddings=257))  # without <|im_end|>
    await edge.server.served.wait_until_ready_is(True)
    edge.engine.script = says("ok")
    prompts = {"text": text("a<|im_end|>"), "chat": chat("a"), "tokens": tokens(1, 257)}
    if kind == "Tokenize":
        call = edge.inference.Tokenize(pb.TokenizeRequest(text="a<|im_end|>"))
    else:
        call = edge.inference.Generate(prompts[kind])
    code, details = await status_of(call)
    assert code == INVALID
    assert "is 257; allowed: 0 to 256 (the vocabulary)" in details
    assert kind == "tokens" or "'<|im_end|>'" in details
    assert edge.engine.submitted == []
    assert text_of(await read_all(edge.inference.Generate(tokens(0, 256)))) == "ok"
    await stop(edge)


async def test_a_silent_connection_may_be_pinged(edge: Edge) -> None:
    """Clients' keepalive pings cut off the streams of whoever waited in the queue. By hand, as
    gRPC's own client leaves a second between two pings, and the third was too many."""
    ping, goaway, settings, is_ack = 6, 7, 4, 1
    reader, writer = await asyncio.open_connection("127.0.0.1", edge.server.port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(settings))
    for number in range(20):
        writer.write(frame(ping, number.to_bytes(8)))
        kind = flags = -1
        while (kind, flags) != (ping, is_ack):
            header = await asyncio.wait_for(reader.readexactly(9), 10)
            kind, flags = header[3:5]
            content = await reader.readexactly(int.from_bytes(header[:3]))
            assert kind != goaway, content
    writer.close()
    await writer.wait_closed()


def frame(kind: int, content: bytes = b"") -> bytes:
    """An HTTP/2 frame of the whole connection, without flags."""
    return len(content).to_bytes(3) + bytes((kind, 0)) + bytes(4) + content
