"""sd_notify."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from scheduler_svc.systemd import notify


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_systemd_is_told(tmp_path: Path, kind: str) -> None:
    """Type=notify units hang in "activating" until READY=1 comes."""
    name = str(tmp_path / "notify") if kind == "path" else f"@{tmp_path}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(name if kind == "path" else "\0" + name[1:])
        listener.settimeout(5)
        assert notify("READY=1", {"NOTIFY_SOCKET": name})
        assert listener.recv(100) == b"READY=1"


def test_nobody_asked() -> None:
    """Outside of systemd there is no socket, and that is no error."""
    assert not notify("READY=1", {})
