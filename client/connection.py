"""How both stubs connect: the default address and the channel's settings."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final
from urllib.parse import urlsplit

DEFAULT_ADDRESS: Final = "localhost:50051"

# Message sizes: the server has its own limit and names it; a second one here would only hide it.
# Keepalive: a server closes a connection that pings an idle stream more often than every 5
# minutes, unless it says otherwise. Slower than that, a peer that lost its power is still noticed.
# Reconnecting: gRPC would wait longer with each try, and notice a server minutes after its start.
_OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

_OWN_NAMES: Final = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")

READY_POLL_SECONDS: Final = 0.2
LONGEST_SECONDS: Final = 1e9  # of a deadline; gRPC takes a much longer one for one that has passed
READY_SECONDS: Final = 5.0  # that a server which is ready needs at most to say so


def channel_options(address: str) -> list[tuple[str, int]]:
    """The settings of a channel to `address`, a gRPC target."""
    # gRPC asks http_proxy for whatever no_proxy does not list, this machine included
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
    except ValueError:  # a bracket too few: gRPC says what is wrong with it
        return False
    if host in _OWN_NAMES or host.endswith(".localhost") or host == socket.gethostname().lower():
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ip.is_loopback or ip.is_unspecified
