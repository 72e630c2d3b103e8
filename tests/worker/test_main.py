"""The worker as a process: signals, exit codes, what is on standard error, systemd's socket."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fake_scheduler import FakeScheduler

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        root = Path(__file__).parents[2]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "worker", *arguments],
            env=os.environ | {"PYTHONPATH": str(root)} | environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_it_cleanly(start: Start, tmp_path: Path, signum: signal.Signals) -> None:
    """Ctrl-C reaches the whole group: a traceback there looks like a crash, and isn't one."""
    notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with notified:
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(60)
        process = start(
            "--connect", f"ipc://{tmp_path}/link", NOTIFY_SOCKET=str(tmp_path / "notify")
        )
        assert notified.recv(1000) == b"READY=1"
        assert notified.recv(1000) == b"STATUS=waiting for the scheduler"
        process.send_signal(signum)
        _, log = process.communicate(timeout=60)
        assert notified.recv(1000) == b"STOPPING=1"
    assert process.returncode == 0, log
    assert "Traceback" not in log
    assert log.strip().endswith("worker: the worker was told to stop")


def test_model_that_is_not_there_ends_it_with_code_2(start: Start, tmp_path: Path) -> None:
    """systemd must not restart what cannot work, and a person must read why, on both sides."""
    scheduler = FakeScheduler(f"ipc://{tmp_path}/link", beats=True)
    process = start("--connect", f"ipc://{tmp_path}/link")
    scheduler.configure(model="/no/such/folder", device="cpu")
    fault = scheduler.receive("fault").fault
    scheduler.receive("bye")
    _, log = process.communicate(timeout=60)
    scheduler.close()
    assert process.returncode == 2
    assert fault.is_fatal
    assert "'/no/such/folder'" in fault.error
    assert fault.error in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--connect", "nonsense"], "allowed: ipc://PATH or tcp://HOST:PORT"),
        (["--connect", "ipc:///tmp/x", "--threads", "-1"], "--threads is -1; allowed: 0 or more"),
        ([], "--connect"),
    ],
)
def test_wrong_arguments_are_named(start: Start, arguments: list[str], message: str) -> None:
    """A typing error must end in a sentence, not in waiting."""
    process = start(*arguments)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 2
    assert message in log
    assert "Traceback" not in log


# runs instead of what follows `_keep_freed_memory` in main(): page faults of a result as large as
# the sampler's, taken and given back three times
FAULTS = """
import resource, sys
import worker.__main__ as program

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def measure():
    print([faults() for _ in range(3)])
    sys.exit()

if "twin" in sys.argv:
    measure()
program.build_ahead = measure
program.main(["--connect", "ipc:///nowhere"])
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="a C library without mallopt")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    """Else every step of many sampled rows takes thousands of pages anew, and has them zeroed."""

    def last_faults(*arguments: str) -> int:
        line = [sys.executable, "-c", FAULTS, *arguments]
        done = subprocess.run(line, capture_output=True, check=True, text=True, timeout=60)
        return json.loads(done.stdout)[-1]

    assert last_faults("twin") >= 32  # of 2 MiB at the most
    assert last_faults() < 5
