"""What a step costs the scheduler's core: `python -m tests.bench.step_cost`.

Times plan (packing included) + absorb, without a model, for decoding requests in steady state,
with and without many others that wait. CPU time of the thread, lower quartiles: others may use
the machine too. Also gives it in units of a plain Python loop that looks up a request and appends
one token, once for each of the rows, so that figures of different machines can be compared.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.limits import FULL_ATTENTION, Geometry, GroupGeometry, Limits
from scheduler_svc.core.request import NewRequest, Request, Sampling
from scheduler_svc.core.scheduler import Scheduler
from tests.support.without_model import without_model

PAGE_SIZE = 16
PROMPT = 64
MAX_TOKENS = 1500
PARTS = ("plan", "absorb")


@dataclass(frozen=True)
class Cost:
    """Microseconds of a step."""

    parts: tuple[float, ...]  # of each of PARTS
    loop: float  # of the plain loop over the rows

    @property
    def total(self) -> float:
        return sum(self.parts)


def decoding(num_requests: int, num_waiting: int = 0) -> Scheduler:
    """That many requests that decode, and others that find no row."""
    pages = -(-(PROMPT + MAX_TOKENS) // PAGE_SIZE)
    geometry = Geometry(
        page_size=PAGE_SIZE,
        num_chunks=num_requests * pages + 2,
        chunk_bytes=1,
        groups=(GroupGeometry(FULL_ATTENTION, 1, 1),),
        max_model_len=2048,
    )
    limits = Limits(max(8192, num_requests), num_requests, safety_margin=0.0)
    scheduler = Scheduler(limits, geometry)
    rng = np.random.default_rng(1)
    sampling = Sampling(temperature=1.0, stop_token_ids=frozenset({2}))
    for number in range(num_requests):
        # lengths differ, so that pages fill at different steps
        prompt = rng.integers(0, 50_000, PROMPT - number % PAGE_SIZE).tolist()
        scheduler.submit(NewRequest(f"r{number}", prompt, MAX_TOKENS, sampling))
    rows = scheduler.state.rows
    while len(rows.running) < num_requests or not rows.is_decoding.all():
        _step(scheduler)
    waiting = rng.integers(0, 50_000, PROMPT).tolist()
    for number in range(num_waiting):
        scheduler.submit(NewRequest(f"w{number}", waiting, MAX_TOKENS, sampling))
    return scheduler


def _step(scheduler: Scheduler) -> list[float]:
    """Seconds of each of PARTS."""
    begin = time.thread_time()
    plan = scheduler.plan()
    planned = time.thread_time() - begin
    assert plan is not None
    result = without_model(plan)
    begin = time.thread_time()
    scheduler.absorb(result)
    return [planned, time.thread_time() - begin]


def _loop(running: dict[int, Request], rows: list[int]) -> float:
    """Seconds of the yardstick."""
    tokens: list[tuple[Request, int]] = []
    begin = time.thread_time()
    for row in rows:
        tokens.append((running[row], row))  # noqa: PERF401 (that is the yardstick)
    return time.thread_time() - begin


def cost(scheduler: Scheduler, num_steps: int = 64) -> Cost:
    """Of so many further steps: whole multiples of a page, in which every row fills one."""
    rows = scheduler.state.rows
    in_use = rows.in_use().tolist()
    parts, loops = [], []
    for _ in range(num_steps):
        parts.append(_step(scheduler))
        loops.append(_loop(rows.running, in_use))
    measured = np.array(parts) * 1e6
    total = float(np.quantile(measured.sum(axis=1), 0.25))
    shares = np.quantile(measured, 0.25, axis=0)
    return Cost(
        tuple((shares * total / shares.sum()).tolist()), float(np.quantile(loops, 0.25)) * 1e6
    )


def main() -> None:
    print(f"{'decoding':>9}{'waiting':>9}" + "".join(f"{part:>9}" for part in PARTS)
          + f"{'sum':>9}{'a row':>9}{'loops':>9}   (µs)")  # fmt: skip
    for num_requests in (64, 256, 1024, 4096):
        for num_waiting in (0, 1_000, 100_000):
            found = cost(decoding(num_requests, num_waiting))
            print(f"{num_requests:>9}{num_waiting:>9}"
                  + "".join(f"{part:>9.0f}" for part in found.parts)
                  + f"{found.total:>9.0f}{found.total / num_requests:>9.2f}"
                  + f"{found.total / found.loop:>9.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
