"""Reports the service's status to systemd (sd_notify): a datagram to the socket in $NOTIFY_SOCKET.

Without that variable, as in a terminal, nothing is sent.
"""

from __future__ import annotations

import functools
import logging
import os
import socket

logger = logging.getLogger(__name__)

_SECONDS = 1.0  # for which systemd's full queue may block this process


def notify(*assignments: str) -> None:
    """Sends e.g. "READY=1", "STATUS=loading", "STOPPING=1". Socket errors are logged, each once:
    they are no reason to stop serving."""
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
    logger.warning("cannot notify systemd through NOTIFY_SOCKET %s: %s", address, reason)
