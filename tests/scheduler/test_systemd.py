"""sd_notify."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

import worker.process.systemd
from scheduler_svc.settings import systemd
from scheduler_svc.settings.systemd import notify


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


@pytest.mark.parametrize("address", ["/nonexistent/x", "/" + "x" * 200, "@" + "x" * 200])
def test_a_socket_that_takes_nothing_is_logged(
    address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether systemd listens must not decide about serving, in neither process."""
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert not notify("READY=1")
    for _ in range(2):
        worker.process.systemd.notify("READY=1")  # says it once: it tells of each quarter of a load
    assert [address in record.getMessage() for record in caplog.records] == [True, True]


def test_a_full_queue_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager that has stopped reading would stop the event loop, and each stream with it."""
    monkeypatch.setattr(systemd, "_SECONDS", 0.05)
    name = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(name)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as full:
            full.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    full.sendto(b"x", name)
        assert not notify("READY=1", {"NOTIFY_SOCKET": name})
