"""Tells systemd how the process is (sd_notify): a datagram to the socket in $NOTIFY_SOCKET.

Without that variable, as in a terminal, nothing happens.
"""

from __future__ import annotations

import functools
import logging
import os
import socket

logger = logging.getLogger(__name__)

_SECONDS = 1.0  # that a full queue of systemd's may hold up this process


def notify(*assignments: str) -> None:
    """Sends e.g. "READY=1", "STATUS=loading", "STOPPING=1". A systemd that does not listen is no
    reason to stop serving, so errors of the socket are logged, each once."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    name = "\0" + address[1:] if address.startswith("@") else address  # Linux's abstract namespace
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as datagram:
            datagram.settimeout(_SECONDS)
            datagram.sendto("\n".join(assignments).encode(), name)
    except OSError as error:
        _warn(address, str(error))


@functools.cache
def _warn(address: str, reason: str) -> None:
    logger.warning("NOTIFY_SOCKET %s takes no messages: %s", address, reason)
