"""Talks to a Chairlift server: `Chairlift` for ordinary code, `AsyncChairlift` for asyncio.

Needs grpcio and protobuf only. The `chairlift` command lives here too (client/cli.py).
"""

from client.aio import AsyncChairlift
from client.aio_stream import AsyncTokenStream
from client.answers import (
    Answer,
    Completion,
    Delta,
    Started,
    Timing,
    TokenLogprobs,
    Usage,
)
from client.blocking import Chairlift
from client.blocking_stream import TokenStream
from client.chat_messages import ChatMessage, ToolCall
from client.errors import (
    Cancelled,
    ChairliftError,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    NotFound,
    NotImplementedYet,
    Paused,
    QueueFull,
    ServerError,
    Unauthenticated,
    Unavailable,
    Unreachable,
)
from client.mapping import MapProgress
from client.messages import GenerateOptions, SamplingOptions

__all__ = [
    "Answer",
    "AsyncChairlift",
    "AsyncTokenStream",
    "Cancelled",
    "Chairlift",
    "ChairliftError",
    "ChatMessage",
    "Completion",
    "DeadlineExceeded",
    "Delta",
    "DuplicateRequest",
    "GenerateOptions",
    "InvalidRequest",
    "MapProgress",
    "NotFound",
    "NotImplementedYet",
    "Paused",
    "QueueFull",
    "SamplingOptions",
    "ServerError",
    "Started",
    "Timing",
    "TokenLogprobs",
    "TokenStream",
    "ToolCall",
    "Unauthenticated",
    "Unavailable",
    "Unreachable",
    "Usage",
]
