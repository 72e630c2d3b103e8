"""What both ends of the worker link agree on beside the messages themselves (link.proto)."""

from __future__ import annotations

from typing import Final

PROTOCOL: Final = 2  # both ends must speak the same one
HEARTBEAT_SECONDS: Final = 0.5  # between two heartbeats, in either direction
