"""The one place where exceptions become gRPC statuses.

Handlers raise; this interceptor ends the call. Anything that is no ChairliftError is a bug: it is
logged with its traceback, and the client learns no more than that.

QueueFull carries google.rpc.RetryInfo in `grpc-status-details-bin`, where client libraries look
for it. Its three messages are framed by hand around protobuf's own Any and Duration: the packages
that define them (googleapis-common-protos, grpcio-status) would be two more dependencies for
some twenty bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration

from scheduler_svc.errors import (
    ChairliftError,
    DeadlineExceeded,
    DuplicateRequest,
    NotImplementedYet,
    Paused,
    QueueFull,
    RequestFailed,
    RequestRejected,
    Unavailable,
    UnknownRequest,
)

log = logging.getLogger(__name__)

STATUS_OF: Final[dict[type[ChairliftError], grpc.StatusCode]] = {
    RequestRejected: grpc.StatusCode.INVALID_ARGUMENT,
    NotImplementedYet: grpc.StatusCode.UNIMPLEMENTED,
    DuplicateRequest: grpc.StatusCode.ALREADY_EXISTS,
    UnknownRequest: grpc.StatusCode.NOT_FOUND,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Paused: grpc.StatusCode.FAILED_PRECONDITION,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    RequestFailed: grpc.StatusCode.INTERNAL,
}
OWN_METHODS: Final = "/chairlift.v1."
DETAILS_KEY: Final = "grpc-status-details-bin"


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of chairlift.v1, which are coroutines; health and reflection pass."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(OWN_METHODS):
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _guarded(handler.unary_stream, method),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            _guarded(handler.unary_unary, method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _guarded(handler: Any, method: str) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await handler(request, context)
        except ChairliftError as error:
            await _abort(context, error)
        except grpc.aio.AbortError:
            raise
        except grpc.aio.InternalError as error:  # a write failed: the client has gone
            log.debug("%s ended with its client: %s", method, error)
            raise asyncio.CancelledError from error
        except Exception:
            log.exception("%s failed", method)
            await context.abort(
                grpc.StatusCode.INTERNAL, "a bug in Chairlift; the scheduler's log tells more"
            )

    return call


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: ChairliftError) -> NoReturn:
    code = STATUS_OF[type(error)]
    trailing: tuple[tuple[str, str | bytes], ...] = ()
    if isinstance(error, QueueFull):
        trailing = ((DETAILS_KEY, retry_details(code, str(error), error.retry_seconds)),)
    await context.abort(code, str(error), trailing)


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
