"""Reports service status to systemd (sd_notify, Type=notify), if it is listening."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from typing import Final

logger = logging.getLogger(__name__)

_SECONDS: Final = 1.0  # longest wait for a full queue of systemd's


def notify(message: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Sends e.g. "READY=1" to the socket in NOTIFY_SOCKET; False if there is none, or if sending
    fails, which is logged but no reason not to serve."""
    address = environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    name = "\0" + address[1:] if address.startswith("@") else address  # Linux's abstract sockets
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(_SECONDS)
            sock.sendto(message.encode(), name)
    except OSError as error:
        logger.warning("cannot send %s to NOTIFY_SOCKET %s: %s", message, address, error)
        return False
    return True
