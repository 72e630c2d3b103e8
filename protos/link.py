"""What both ends of the worker link agree on, besides its messages (link.proto, plan.py)."""

from __future__ import annotations

from typing import Final

PROTOCOL: Final = 3  # both ends must have the same one
HEARTBEAT_SECONDS: Final = 0.5  # between two heartbeats, in either direction

# CacheGroup.kind: the attention type of a group's layers
FULL_ATTENTION: Final = "full_attention"
SLIDING_ATTENTION: Final = "sliding_attention"
