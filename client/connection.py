"""The connection to a server: default address and channel settings."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final
from urllib.parse import urlsplit

import grpc

DEFAULT_ADDRESS: Final = "localhost:50051"

# Message sizes: the server enforces its own limit and names it; a second one would hide that.
# Keepalive: by default a gRPC server closes a connection that pings an idle stream more often than
# every 5 minutes. A slower ping still detects a peer that lost power.
# Reconnecting: gRPC's exponential backoff would notice a started server minutes late.
_OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

_LOOPBACK_NAMES: Final = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")

READY_POLL_SECONDS: Final = 0.2
READY_SECONDS: Final = 5.0  # default deadline of a readiness check
MAX_DEADLINE_SECONDS: Final = 1e9  # gRPC treats a much longer deadline as one that has passed


def open_channel(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    options = channel_options(address)
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def open_async_channel(
    address: str, credentials: grpc.ChannelCredentials | None
) -> grpc.aio.Channel:
    options = channel_options(address)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def channel_options(address: str) -> list[tuple[str, int]]:
    """The settings of a channel to `address`, a gRPC target."""
    # gRPC uses http_proxy unless no_proxy lists the host, loopback included
    return [*_OPTIONS, ("grpc.enable_http_proxy", 0)] if is_loopback(address) else [*_OPTIONS]


def is_loopback(address: str) -> bool:
    """Whether a gRPC target ("host:port", "dns:///host:port", "unix:path") is this machine."""
    scheme, colon, rest = address.partition(":")
    if colon and scheme in ("unix", "unix-abstract"):
        return True
    if colon and scheme in ("dns", "ipv4", "ipv6"):
        address = rest.rpartition("/")[2]
    try:
        host = (urlsplit(f"//{address}").hostname or "").removesuffix(".")
    except ValueError:  # an unmatched bracket: gRPC reports it
        return False
    if (
        host in _LOOPBACK_NAMES
        or host.endswith(".localhost")
        or host == socket.gethostname().lower()
    ):
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ip.is_loopback or ip.is_unspecified
