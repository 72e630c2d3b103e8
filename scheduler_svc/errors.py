"""The ways in which a request can fail, and the gRPC status of each.

    ChairliftError
    ├── RequestRejected    INVALID_ARGUMENT     names the field, the value and the limit
    ├── ConstraintFailed   INVALID_ARGUMENT     the grammar became too complex on the way
    ├── NotImplementedYet  UNIMPLEMENTED        names what is not supported yet
    ├── DuplicateRequest   ALREADY_EXISTS       the id belongs to a live request
    ├── UnknownRequest     NOT_FOUND            no live request has that id
    ├── QueueFull          RESOURCE_EXHAUSTED   with RetryInfo
    ├── Unavailable        UNAVAILABLE          draining, or no worker and none expected
    ├── DeadlineExceeded   DEADLINE_EXCEEDED    not finished within request_timeout
    └── RequestFailed      INTERNAL             the request made the worker fail; names the request

A client that disconnects is not an error but an abort, and a lost worker is not an error of its
requests: they run again. A broken invariant is a crash, never a status.
"""

from __future__ import annotations


class ChairliftError(Exception):
    """An error reported to the client; `str()` is a sentence that says what to do next."""


class RequestRejected(ChairliftError):
    """A field of a request has a value that is not allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} is {_short(value)}; allowed: {allowed}")
        self.field = field


class ConstraintFailed(ChairliftError):
    """An answer's grammar cannot be followed further."""


class NotImplementedYet(ChairliftError):
    """A part of the API that this version does not support."""


class DuplicateRequest(ChairliftError):
    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"request_id {_short(request_id)} belongs to a live request; choose another"
        )


class UnknownRequest(ChairliftError):
    def __init__(self, request_id: str) -> None:
        super().__init__(f"no live request has the id {_short(request_id)}")


class QueueFull(ChairliftError):
    """`retry_seconds` goes into the client's RetryInfo."""

    def __init__(self, waiting: int, limit: int, retry_seconds: float = 1.0) -> None:
        super().__init__(f"{waiting} requests are waiting; max_queue_size is {limit}: retry later")
        self.retry_seconds = retry_seconds


class Unavailable(ChairliftError):
    pass


class DeadlineExceeded(ChairliftError):
    def __init__(self, seconds: float) -> None:
        super().__init__(f"not finished within {seconds:g} s, the server's request_timeout")


class RequestFailed(ChairliftError):
    pass


def _short(value: object) -> str:
    if isinstance(value, str | bytes) and len(value) > 120:
        return f"{value[:100]!r}… ({len(value)} characters)"
    text = repr(value)
    return text if len(text) <= 500 else f"{text[:400]}…"
