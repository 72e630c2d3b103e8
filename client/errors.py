"""Errors of the client, by gRPC status. `str()` is the server's sentence.

    ChairliftError
    ├── InvalidRequest     INVALID_ARGUMENT
    ├── DuplicateRequest   ALREADY_EXISTS
    ├── NotFound           NOT_FOUND
    ├── QueueFull          RESOURCE_EXHAUSTED
    ├── Paused             FAILED_PRECONDITION
    ├── Unavailable        UNAVAILABLE
    │   └── Unreachable
    ├── DeadlineExceeded   DEADLINE_EXCEEDED
    ├── Cancelled          CANCELLED
    ├── NotImplementedYet  UNIMPLEMENTED
    ├── Unauthenticated    UNAUTHENTICATED
    └── ServerError        any other status

Python's own TypeError and ValueError mean that an argument does not fit its field; nothing was
sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

Metadata = Iterable[tuple[str, str | bytes]]


class ChairliftError(Exception):
    """A call that failed; `status` is its gRPC status."""

    def __init__(self, message: str, status: grpc.StatusCode) -> None:
        super().__init__(message)
        self.status = status


class InvalidRequest(ChairliftError):
    """A field has a value that is not allowed."""


class DuplicateRequest(ChairliftError):
    """The request_id belongs to a live request."""


class NotFound(ChairliftError):
    """No live request has that id."""


class QueueFull(ChairliftError):
    """Too many requests are waiting; retry after `retry_seconds`."""

    retry_seconds: float = 1.0  # the server's advice


class Paused(ChairliftError):
    """The server accepts no new requests for now."""


class Unavailable(ChairliftError):
    """The server is draining, or has no worker and expects none."""


class Unreachable(Unavailable):
    """No server answers at that address."""


class DeadlineExceeded(ChairliftError):
    """The timeout of the call has passed."""


class Cancelled(ChairliftError):
    """Cancelled by this client, or because the server stopped."""


class NotImplementedYet(ChairliftError):
    """This server does not support the call or the option."""


class Unauthenticated(ChairliftError):
    """Refused by a proxy in front of the server; Chairlift itself has no accounts."""


class ServerError(ChairliftError):
    """A fault of the server: report it."""


_BY_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.ALREADY_EXISTS: DuplicateRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFull,
    grpc.StatusCode.FAILED_PRECONDITION: Paused,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNIMPLEMENTED: NotImplementedYet,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}

# Messages of gRPC's own transport, as opposed to a server's: no connection could be made, …
_NO_CONNECTION = (
    "failed to connect to all addresses",
    "DNS resolution failed",
    "errors resolving",
)
# … the deadline passed, and the connection was lost.
_DEADLINE_PASSED = ("Deadline Exceeded", "Stream removed (Deadline Exceeded)")
_CONNECTION_BROKE = (
    "Socket closed", "Stream removed", "Connection reset", "recvmsg", "Received RST_STREAM"
)  # fmt: skip
_BROKEN_STATUSES = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)


def from_rpc_error(error: Any, address: str) -> ChairliftError:
    """The error for a failed call to `address`, from gRPC's own exception."""
    return from_status(
        error.code(), error.details() or "", address, error.trailing_metadata() or ()
    )


def from_status(
    status: grpc.StatusCode, details: str, address: str, trailing_metadata: Metadata = ()
) -> ChairliftError:
    """The error for a call to `address` that ended with `status`."""
    if status is grpc.StatusCode.UNAVAILABLE and details.startswith(_NO_CONNECTION):
        return Unreachable(
            f"no Chairlift server answers at {address}: start one with `chairlift serve`, or use "
            f"another address ({details})",
            status,
        )
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and "metadata size exceeds" in details:
        return ServerError(f"the server's error exceeds gRPC's metadata limit: {details}", status)
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than max" in details:
        return InvalidRequest(f"{details}; the limit is the server's max_message_bytes", status)
    if details in _DEADLINE_PASSED:
        status = grpc.StatusCode.DEADLINE_EXCEEDED
        details = "the timeout passed before the answer was complete"
    if details.startswith(_CONNECTION_BROKE):
        details = (
            f"the connection to {address} broke before the answer was complete; is the server "
            f"still running? ({details})"
        )
        if status in _BROKEN_STATUSES:  # as some proxies and versions of gRPC report it
            status = grpc.StatusCode.UNAVAILABLE
    kind = _BY_STATUS.get(status, ServerError)
    error = kind(details or f"the server ended the call with {status.name}", status)
    if isinstance(error, QueueFull):
        error.retry_seconds = _retry_seconds(trailing_metadata) or error.retry_seconds
    return error


def _retry_seconds(trailing_metadata: Metadata) -> float | None:
    """The delay of google.rpc.Status { 3: details { RetryInfo { 1: Duration } } }, or None.

    Decoded by field number: grpcio-status and googleapis-common-protos, which define the two
    messages, would be two more dependencies of every client.
    """
    for key, value in trailing_metadata:
        if key != "grpc-status-details-bin" or not isinstance(value, bytes):
            continue
        for detail in _fields(value, number=3):
            message = AnyMessage.FromString(detail)
            if message.type_url.endswith("/google.rpc.RetryInfo"):
                for delay in _fields(message.value, number=1):
                    return Duration.FromString(delay).ToTimedelta().total_seconds()
    return None


def _fields(message: bytes, number: int) -> list[bytes]:
    """All values of one field of a serialized message of unknown type."""
    fields = UnknownFieldSet(Empty.FromString(message))
    found = [fields[position] for position in range(len(fields))]
    return [field.data for field in found if field.field_number == number]
