"""Guards run-ahead: how long the device idles between two steps, with run-ahead and without.

Engine, link and text are real; the worker is another process, whose device only waits
(simulated_worker.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protos import link_pb2
from scheduler_svc.__main__ import SWITCH_SECONDS
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.request import NewRequest
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.events import Delta, Event, Finished, Submission
from scheduler_svc.engine.worker_link import WorkerLink
from scheduler_svc.text.text import OutputText, Pieces
from tests.support.small_tokenizers import byte_level

STEP_MS = 5.0
NUM_REQUESTS = 256
MAX_TOKENS = 200
NUM_LETTERS = 90  # the first tokens of a byte-level vocabulary: no broken characters
TURNS = 3


def gaps(socket: Path, depth: int) -> np.ndarray:
    """Idle time before each step of 256 decoding requests, as a share of a step. [steps]"""
    address = f"ipc://{socket}"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.support.simulated_worker", address,
         "--step-ms", str(STEP_MS), "--vocab-size", str(NUM_LETTERS)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    ended, remaining = threading.Event(), NUM_REQUESTS

    def deliver(events: list[Event]) -> None:
        nonlocal remaining
        for event in events:
            if isinstance(event, Delta):
                event.is_taken = True  # as by clients that read at once
        remaining -= sum(isinstance(event, Finished) for event in events)
        if not remaining:
            ended.set()

    engine = Engine(
        Limits(4096, NUM_REQUESTS, safety_margin=0.0, max_plans_in_flight=depth),
        link_pb2.Configure(model="simulated"),
        WorkerLink(address, boot_id=1),
        heartbeat_timeout=60.0,
    )
    engine.attach(deliver, lambda status: None)
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
@pytest.mark.timeout(300)
def test_the_device_waits_less_with_run_ahead(
    benchmark: Any, tmp_path: Path, show: Callable[[str], None]
) -> None:
    """Run-ahead that does not run ahead: the device idles while Python thinks."""
    if benchmark.disabled:
        pytest.skip("measures; run by `make guards`")
    turns = [
        [float(np.median(gaps(tmp_path / f"{depth}-{turn}", depth))) for depth in (1, 2)]
        for turn in range(TURNS)
    ]
    benchmark.pedantic(lambda: None)  # the figures are those of the worker's own clock
    without, with_run_ahead = np.median(turns, axis=0)
    show(
        f"device idle between steps of {STEP_MS:g} ms, {NUM_REQUESTS} requests: median "
        f"{without:.1%} of a step without run-ahead, {with_run_ahead:.1%} with it"
    )
    assert with_run_ahead < without
