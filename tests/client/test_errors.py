"""What gRPC's own transport says, put into words that tell what to do."""

from __future__ import annotations

import grpc
import pytest

from client.errors import (
    ChairliftError,
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    ServerError,
    Unavailable,
    Unreachable,
    from_status,
)

TRAILERS = (
    "Stream removed (received metadata size exceeds hard limit (value length 20029 vs. 16384))"
)


@pytest.mark.parametrize(
    ("status", "details", "kind", "sentence"),
    [
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", DeadlineExceeded, "the timeout passed before"),
        ("UNAVAILABLE", "Stream removed (Deadline Exceeded)", DeadlineExceeded, "the timeout"),
        ("UNAVAILABLE", "Stream removed (Socket closed)", Unavailable, "h:1 broke before the"),
        ("UNKNOWN", "Stream removed", Unavailable, "is the server still running?"),
        ("INTERNAL", "Received RST_STREAM with error code 2", Unavailable, "broke before the"),
        ("UNAVAILABLE", "Socket closed", Unavailable, "is the server still running?"),
        ("UNAVAILABLE", "errors resolving h:1: [x]", Unreachable, "answers at h:1: start"),
        ("UNAVAILABLE", "draining: try later", Unavailable, "draining: try later"),
        ("INVALID_ARGUMENT", "stop[0] is 'Deadline Exceeded'", InvalidRequest, "stop[0] is"),
        ("RESOURCE_EXHAUSTED", "4 requests wait", QueueFull, "4 requests wait"),
        ("RESOURCE_EXHAUSTED", TRAILERS, ServerError, "exceeds gRPC's metadata limit"),
    ],
)
def test_transport_errors_say_what_to_do(
    status: str, details: str, kind: type[ChairliftError], sentence: str
) -> None:
    """A user reads 'Stream removed' and knows nothing."""
    error = from_status(grpc.StatusCode[status], details, "h:1")
    assert type(error) is kind
    assert sentence in str(error)
