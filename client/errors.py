"""What can go wrong for a client, by gRPC status. `str()` is the server's sentence.

    ChairliftError
    ├── InvalidRequest     INVALID_ARGUMENT     a field has a value that is not allowed
    ├── DuplicateRequest   ALREADY_EXISTS       the request_id belongs to a live request
    ├── NotFound           NOT_FOUND            no live request has that id
    ├── QueueFull          RESOURCE_EXHAUSTED   retry later
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

import grpc


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
    pass


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
_NO_CONNECTION = ("failed to connect to all addresses", "DNS resolution failed")


def from_status(status: grpc.StatusCode, details: str, address: str) -> ChairliftError:
    """The error that a call to `address` ended with."""
    if status is grpc.StatusCode.UNAVAILABLE and details.startswith(_NO_CONNECTION):
        return Unreachable(
            f"no Chairlift answers at {address}: start one with `chairlift serve`, or give "
            f"another address ({details})",
            status,
        )
    kind = _BY_STATUS.get(status, ServerError)
    return kind(details or f"the server ended the call with {status.name}", status)
