"""How long the device waits for the scheduler between two steps: `engine`, link and text are
real; the worker is another process, whose device only waits (simulated_worker.py)."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from protos import link_pb2
from scheduler_svc.__main__ import SWITCH_SECONDS
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.request import NewRequest
from scheduler_svc.engine import Engine
from scheduler_svc.events import Event, Finished, Submission
from scheduler_svc.text import OutputText, Pieces
from scheduler_svc.worker_link import WorkerLink
from tests.scheduler.small_tokenizers import byte_level

STEP_MS = 5.0
NUM_REQUESTS = 256
MAX_TOKENS = 200
NUM_LETTERS = 90  # the first tokens of a byte-level vocabulary: no broken characters
TRIES = 3  # of which the best counts: others may have wanted the machine's cores


def gaps(socket: Path, depth: int) -> np.ndarray:
    """Idle time before each step of 256 decoding requests, as a share of a step. [steps]"""
    address = f"ipc://{socket}"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.scheduler.simulated_worker", address,
         "--step-ms", str(STEP_MS), "--vocab-size", str(NUM_LETTERS)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    ended, remaining = threading.Event(), NUM_REQUESTS

    def deliver(events: list[Event]) -> None:
        nonlocal remaining
        remaining -= sum(isinstance(event, Finished) for event in events)
        if not remaining:
            ended.set()

    engine = Engine(
        Limits(4096, NUM_REQUESTS, safety_margin=0.0, max_plans_in_flight=depth),
        link_pb2.Configure(model="simulated"),
        WorkerLink(address, boot_id=1),
        deliver,
        lambda status: None,
        heartbeat_timeout=60.0,
    )
    engine.start()
    decode = byte_level().decode
    pieces = Pieces(decode)
    try:
        for number in range(NUM_REQUESTS):
            prompt = [number % 250, number // 250, *range(14)]
            new = NewRequest(f"r{number}", prompt, MAX_TOKENS)
            engine.submit(Submission(new, [OutputText(decode, prompt, pieces=pieces)]))
        assert ended.wait(60), f"{remaining} requests have not ended"
    finally:
        engine.stop()
        said, _ = process.communicate(timeout=20)
    steps = json.loads(said)
    return np.array([gap for rows, gap, _ in steps if rows == NUM_REQUESTS]) / (STEP_MS / 1000)


@pytest.fixture
def _as_served() -> Iterator[None]:
    """Threads change places as often as in the scheduler's process."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("_as_served")
@pytest.mark.timeout(120)
def test_the_device_waits_for_the_scheduler(tmp_path: Path, show: Callable[[str], None]) -> None:
    """Run-ahead that does not run ahead: the device idles while Python thinks."""
    found = {}
    for depth in (1, 2):
        tries: list[np.ndarray] = []
        while len(tries) < TRIES and (not tries or np.median(tries[-1]) >= 0.05):
            tries.append(gaps(tmp_path / f"{depth}-{len(tries)}", depth))
            assert len(tries[-1]) > MAX_TOKENS / 2
        shares = min(tries, key=np.median)
        found[depth] = float(np.median(shares))
        show(
            f"device idle between steps of {STEP_MS:g} ms, {NUM_REQUESTS} requests, "
            f"{'with' if depth == 2 else 'without'} run-ahead: median {found[depth]:.1%} of a "
            f"step, mean {shares.mean():.1%}, worst of ten {np.quantile(shares, 0.9):.1%}"
        )
    assert found[2] < 0.05
    assert found[2] < found[1]
