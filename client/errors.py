"""What can go wrong for a client, by gRPC status. `str()` is the server's sentence.

    ChairliftError
    ├── InvalidRequest     INVALID_ARGUMENT     a field has a value that is not allowed
    ├── DuplicateRequest   ALREADY_EXISTS       the request_id belongs to a live request
    ├── NotFound           NOT_FOUND            no live request has that id
    ├── QueueFull          RESOURCE_EXHAUSTED   retry after `retry_seconds`
    ├── Paused             FAILED_PRECONDITION  the server takes no new requests for now
    ├── Unavailable        UNAVAILABLE          draining, or no worker and none expected
    │   └── Unreachable                         nobody answers at that address
    ├── DeadlineExceeded   DEADLINE_EXCEEDED    the timeout that was given has passed
    ├── Cancelled          CANCELLED            by this client, or by the server's end
    ├── NotImplementedYet  UNIMPLEMENTED        this server does not have it
    ├── Unauthenticated    UNAUTHENTICATED
    └── ServerError        every other status   a fault of the server: report it

Python's own TypeError and ValueError mean that an argument never became a request.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

Metadata = Iterable[tuple[str, str | bytes]]


class ChairliftError(Exception):
    """A request that did not get its answer."""

    def __init__(self, message: str, status: grpc.StatusCode) -> None:
        super().__init__(message)
        self.status = status


class InvalidRequest(ChairliftError):
    pass


class DuplicateRequest(ChairliftError):
    pass


class NotFound(ChairliftError):
    pass


class QueueFull(ChairliftError):
    retry_seconds: float = 1.0  # as the server advises


class Paused(ChairliftError):
    pass


class Unavailable(ChairliftError):
    pass


class Unreachable(Unavailable):
    pass


class DeadlineExceeded(ChairliftError):
    pass


class Cancelled(ChairliftError):
    pass


class NotImplementedYet(ChairliftError):
    pass


class Unauthenticated(ChairliftError):
    pass


class ServerError(ChairliftError):
    pass


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

# How gRPC's own transport, not a server, words that no connection could be made.
_NO_CONNECTION = (
    "failed to connect to all addresses",
    "DNS resolution failed",
    "errors resolving",
)
_DEADLINE_PASSED = ("Deadline Exceeded", "Stream removed (Deadline Exceeded)")
_CONNECTION_BROKE = ("Socket closed", "Stream removed", "Connection reset", "recvmsg")


def from_status(
    status: grpc.StatusCode, details: str, address: str, trailing_metadata: Metadata = ()
) -> ChairliftError:
    """The error that a call to `address` ended with."""
    if status is grpc.StatusCode.UNAVAILABLE and details.startswith(_NO_CONNECTION):
        return Unreachable(
            f"no Chairlift answers at {address}: start one with `chairlift serve`, or give "
            f"another address ({details})",
            status,
        )
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and "metadata size exceeds" in details:
        return ServerError(f"the server's answer does not fit gRPC's trailers: {details}", status)
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than max" in details:
        return InvalidRequest(f"{details}; the server's max_message_bytes allows no more", status)
    if details in _DEADLINE_PASSED:
        status = grpc.StatusCode.DEADLINE_EXCEEDED
        details = "the timeout passed before the answer was complete"
    if details.startswith(_CONNECTION_BROKE):
        details = (
            f"the connection to {address} broke before the answer was complete; is the server "
            f"still running? ({details})"
        )
    kind = _BY_STATUS.get(status, ServerError)
    error = kind(details or f"the server ended the call with {status.name}", status)
    if isinstance(error, QueueFull):
        error.retry_seconds = _retry_seconds(trailing_metadata) or error.retry_seconds
    return error


def _retry_seconds(trailing_metadata: Metadata) -> float | None:
    """From google.rpc.Status { 3: details { RetryInfo { 1: Duration } } }, if it is there.

    The package that defines these two messages would be a dependency for two field numbers.
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
    """All values of one field of a message whose type is not at hand."""
    fields = UnknownFieldSet(Empty.FromString(message))
    found = [fields[position] for position in range(len(fields))]
    return [field.data for field in found if field.field_number == number]
