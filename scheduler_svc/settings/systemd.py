"""Tells systemd how the service is (Type=notify); does nothing where nobody asks."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from typing import Final

log = logging.getLogger(__name__)

_SECONDS: Final = 1.0  # that a full queue of systemd's may hold up this process


def notify(message: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Sends e.g. "READY=1" to the socket that systemd named; False when it named none, or one that
    does not take it, which is logged: no reason not to serve."""
    address = environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    name = "\0" + address[1:] if address.startswith("@") else address  # Linux's abstract names
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(_SECONDS)
            sock.sendto(message.encode(), name)
    except OSError as error:
        log.warning("%s did not reach NOTIFY_SOCKET %s: %s", message, address, error)
        return False
    return True
