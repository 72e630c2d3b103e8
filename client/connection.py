"""How both stubs connect: the default address and the channel's settings."""

from __future__ import annotations

from typing import Final

DEFAULT_ADDRESS: Final = "localhost:50051"

# Message sizes: the server has its own limit and names it; a second one here would only hide it.
# Keepalive: a server closes a connection that pings an idle stream more often than every 5
# minutes, unless it says otherwise. Slower than that, a peer that lost its power is still noticed.
CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)

READY_POLL_SECONDS: Final = 0.2
