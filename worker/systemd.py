"""Tells systemd how the process is (sd_notify): a datagram to the socket in $NOTIFY_SOCKET.

Without that variable, as in a terminal, nothing happens.
"""

from __future__ import annotations

import os
import socket


def notify(*assignments: str) -> None:
    """Sends e.g. "READY=1", "STATUS=loading", "STOPPING=1". A systemd that does not listen is no
    reason to stop serving, so errors of the socket are ignored."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # Linux's abstract namespace
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as datagram:
        try:
            datagram.sendto("\n".join(assignments).encode(), address)
        except OSError:
            return
