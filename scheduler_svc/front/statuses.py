"""The one place where exceptions become gRPC statuses.

Handlers raise; this interceptor ends the call. An exception other than ChairliftError is a bug: it
is logged with its traceback, and the client only gets INTERNAL.

The interceptor also parses requests, so that it can refuse large ones first: parsing runs in the
event loop, and takes a second for 64 MB of small fields. After a large one it returns freed memory
to the system, as glibc keeps what a thread has freed for that thread's next allocation: after some
long texts, hundreds of MB that nobody will ask for again.

QueueFull carries google.rpc.RetryInfo in `grpc-status-details-bin`, where client libraries look
for it. Its three messages are encoded by hand around protobuf's own Any and Duration: the packages
that define them (googleapis-common-protos, grpcio-status) would be two more dependencies for some
twenty bytes.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError

from scheduler_svc.errors import (
    ChairliftError,
    ConstraintFailed,
    DeadlineExceeded,
    DuplicateRequest,
    NotImplementedYet,
    QueueFull,
    RequestFailed,
    RequestRejected,
    Unavailable,
    UnknownRequest,
)

logger = logging.getLogger(__name__)

STATUS_OF: Final[dict[type[ChairliftError], grpc.StatusCode]] = {
    RequestRejected: grpc.StatusCode.INVALID_ARGUMENT,
    ConstraintFailed: grpc.StatusCode.INVALID_ARGUMENT,
    NotImplementedYet: grpc.StatusCode.UNIMPLEMENTED,
    DuplicateRequest: grpc.StatusCode.ALREADY_EXISTS,
    UnknownRequest: grpc.StatusCode.NOT_FOUND,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    RequestFailed: grpc.StatusCode.INTERNAL,
}
GUARDED: Final = ("/chairlift.v1.", "/vllm.grpc.engine.")  # not health and reflection
BUG: Final = "internal error in Chairlift; see the scheduler's log"
MAX_REQUEST_BYTES: Final = 16 << 20
MAX_DETAILS_BYTES: Final = 6 << 10  # of a message, percent-encoded; clients allow 8 KiB in all
LARGE_BYTES: Final = 1 << 16  # of a request: tokenising takes up to 200 times as much
TRIM_DELAY_SECONDS: Final = 1.0  # so that one trim serves many requests, after they are gone
DETAILS_KEY: Final = "grpc-status-details-bin"


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of the services that generate, which are coroutines."""

    def __init__(self) -> None:
        self._trimmer = Trimmer()

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(GUARDED):
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._guarded(handler.unary_stream, method, handler.request_deserializer),
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._guarded(handler.unary_unary, method, handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _guarded(self, handler: Any, method: str, parse: Any) -> Any:
        async def call(message: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            # gRPC keeps the exception of `abort` in a reference cycle, and with it this frame and
            # the error's: long texts would stay in memory until the garbage collector runs.
            num_bytes, held = len(message), [message]
            del message
            try:
                return await handler(_parsed(held.pop(), parse), context)
            except ChairliftError as error:
                status = _status_of(error)
                error.__traceback__ = None
            except grpc.aio.AbortError:
                raise
            except grpc.aio.InternalError as error:  # a write failed: the client has disconnected
                logger.debug("%s: the client disconnected: %s", method, error)
                raise asyncio.CancelledError from error
            except Exception:
                logger.exception("%s failed", method)
                status = Status(grpc.StatusCode.INTERNAL, BUG)
            finally:
                self._trimmer.note(num_bytes)
            await context.abort(*status)

        return call


class Trimmer:
    """Returns freed memory to the system some time after large requests. For the event loop."""

    def __init__(self) -> None:
        self._trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc needs it
        self._is_due = False

    def note(self, num_bytes: int) -> None:
        """A request of this size has been handled."""
        if self._trim is None or self._is_due or num_bytes < LARGE_BYTES:
            return
        self._is_due = True
        asyncio.get_running_loop().call_later(TRIM_DELAY_SECONDS, self._begin)

    def _begin(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, self._trim, 0)


class Status(NamedTuple):
    code: grpc.StatusCode
    details: str
    trailing: tuple[tuple[str, str | bytes], ...] = ()


def _status_of(error: ChairliftError) -> Status:
    code, details = STATUS_OF[type(error)], _cut(str(error))
    if not isinstance(error, QueueFull):
        return Status(code, details)
    retry = retry_details(code, details, error.retry_seconds)
    return Status(code, details, ((DETAILS_KEY, retry),))


def _parsed(message: bytes, parse: Any) -> Any:
    if len(message) > MAX_REQUEST_BYTES:
        raise RequestRejected(
            "length of the request in bytes", len(message), f"at most {MAX_REQUEST_BYTES}"
        )
    try:
        return parse(message)
    except DecodeError as error:
        raise RequestRejected("the request", message, f"a protobuf message ({error})") from error


def _cut(details: str) -> str:
    """gRPC replaces a status whose message is too long by RESOURCE_EXHAUSTED."""
    while 3 * len(details.encode()) > MAX_DETAILS_BYTES:
        details = details[: len(details) // 2] + "…"
    return details


def retry_details(code: grpc.StatusCode, message: str, seconds: float) -> bytes:
    """A google.rpc.Status {code = 1, message = 2, details = 3} with one RetryInfo {delay = 1}."""
    delay = Duration()
    delay.FromNanoseconds(round(seconds * 1e9))
    details = AnyMessage(
        type_url="type.googleapis.com/google.rpc.RetryInfo",
        value=_field(1, delay.SerializeToString()),
    )
    number: int = code.value[0]
    return (
        bytes((1 << 3, number))  # a varint, below 128 as all codes are
        + _field(2, message.encode())
        + _field(3, details.SerializeToString())
    )


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited protobuf field."""
    length = bytearray()
    rest = len(content)
    while rest >= 0x80:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    length.append(rest)
    return bytes((number << 3 | 2,)) + bytes(length) + content
