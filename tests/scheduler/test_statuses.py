"""Exceptions become statuses in one place, by one table."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory

from scheduler_svc import errors
from scheduler_svc.statuses import STATUS_OF, retry_details


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
