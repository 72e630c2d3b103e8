"""Exceptions become statuses in one place, by one table."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory

from scheduler_svc import errors
from scheduler_svc.front import statuses
from scheduler_svc.front.statuses import STATUS_OF, StatusInterceptor, retry_details
from tests.support.calls import until


def test_every_error_has_a_status() -> None:
    """An error without one would end a call as a bug of ours."""
    assert set(errors.ChairliftError.__subclasses__()) == set(STATUS_OF)


@pytest.mark.parametrize("message", ["busy", "ü" * 200])
@pytest.mark.parametrize("seconds", [0.0, 1.0, 2.5, 3600.0])
def test_retry_details_are_what_google_defines(message: str, seconds: float) -> None:
    """The bytes are framed by hand: here protobuf itself reads them by Google's definition."""
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(duration_pb2.DESCRIPTOR.serialized_pb)
    any_pb2 = descriptor_pool.Default().FindFileByName("google/protobuf/any.proto")
    pool.AddSerializedFile(any_pb2.serialized_pb)
    file = descriptor_pb2.FileDescriptorProto(
        name="rpc.proto",
        package="google.rpc",
        syntax="proto3",
        dependency=["google/protobuf/any.proto", "google/protobuf/duration.proto"],
    )
    field = descriptor_pb2.FieldDescriptorProto
    status = file.message_type.add(name="Status")
    status.field.add(name="code", number=1, type=field.TYPE_INT32, label=field.LABEL_OPTIONAL)
    status.field.add(name="message", number=2, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    status.field.add(
        name="details", number=3, type=field.TYPE_MESSAGE, label=field.LABEL_REPEATED,
        type_name=".google.protobuf.Any",
    )  # fmt: skip
    file.message_type.add(name="RetryInfo").field.add(
        name="retry_delay", number=1, type=field.TYPE_MESSAGE, label=field.LABEL_OPTIONAL,
        type_name=".google.protobuf.Duration",
    )  # fmt: skip
    pool.Add(file)

    def parse(name: str, content: bytes) -> object:
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(name)).FromString(content)

    read = parse(
        "google.rpc.Status",
        retry_details(grpc.StatusCode.RESOURCE_EXHAUSTED, message, seconds),
    )
    assert (read.code, read.message, len(read.details)) == (8, message, 1)
    assert read.details[0].type_url == "type.googleapis.com/google.rpc.RetryInfo"
    delay = parse("google.rpc.RetryInfo", read.details[0].value).retry_delay
    assert delay.seconds + delay.nanos / 1e9 == seconds


class Context:
    """Keeps what `abort` raises, as gRPC's does."""

    async def abort(self, code: grpc.StatusCode, details: str, trailing: Any) -> None:
        self.code = code
        self.raised = grpc.aio.AbortError()
        raise self.raised


@pytest.mark.parametrize("fails_in", ["handler", "parser"])
async def test_a_refused_request_is_let_go(fails_in: str) -> None:
    """Eight refused texts of 8 MB stayed in memory until a garbage collection came by."""
    requests: list[weakref.ref[Any]] = []

    class Request:
        failure: errors.RequestRejected

    def parse(message: bytes) -> Request:
        if fails_in == "parser":
            raise errors.RequestRejected("the request", "x", "y")
        request = Request()
        requests.append(weakref.ref(request))
        return request

    async def handle(request: Request, context: Context) -> None:
        request.failure = errors.RequestRejected("text", "x", "y")  # as a stream has its own
        raise request.failure

    message, context = bytes(1000), Context()
    before = sys.getrefcount(message)
    gc.disable()
    try:
        with pytest.raises(grpc.aio.AbortError):
            await StatusInterceptor()._guarded(handle, "m", parse)(message, context)
        assert context.code == grpc.StatusCode.INVALID_ARGUMENT
        assert sys.getrefcount(message) == before
        assert [request() for request in requests] == [None] * (fails_in == "handler")
    finally:
        gc.enable()


async def test_memory_is_given_back_after_long_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc keeps what was freed: gigabytes after some long texts."""
    monkeypatch.setattr(statuses, "TRIM_DELAY_SECONDS", 0.0)
    trims: list[int] = []
    trimmer = statuses.Trimmer()
    monkeypatch.setattr(trimmer, "_trim", trims.append)
    trimmer.note(1000)
    await asyncio.sleep(0.02)
    assert trims == []
    for _ in range(10):
        trimmer.note(10**6)
    await until(lambda: trims == [0])
    await asyncio.sleep(0.02)
    assert trims == [0], "each message of a burst walked through all of memory"
    trimmer.note(10**6)
    await until(lambda: trims == [0, 0])
