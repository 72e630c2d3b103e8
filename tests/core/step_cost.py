"""What a step costs the scheduler's core: `python -m tests.core.step_cost`.

Times decide + commit + pack + absorb, without a model, for decoding requests in steady state,
with and without many others that wait. Also states the cost as a multiple of what packing the
same plan costs at least: reading and writing its bytes from Python, which is no claim about the
machine that it runs on.
"""

from __future__ import annotations

import time

import numpy as np

from protos.plan import StepPlan, encode_plan
from scheduler_svc.core.absorb import absorb
from scheduler_svc.core.commit import commit
from scheduler_svc.core.decide import decide
from scheduler_svc.core.limits import FULL_ATTENTION, Geometry, GroupGeometry, Limits
from scheduler_svc.core.pack import pack
from scheduler_svc.core.request import NewRequest
from scheduler_svc.core.state import State
from tests.sim.eviction import without_model

PAGE_SIZE = 16
PROMPT = 64
MAX_TOKENS = 1500
PARTS = ("decide", "commit", "pack", "absorb")


def decoding(num_requests: int, num_waiting: int = 0) -> State:
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
    state = State(limits, geometry)
    rng = np.random.default_rng(1)
    for number in range(num_requests):
        # lengths differ, so that pages fill at different steps
        prompt = rng.integers(0, 50_000, PROMPT - number % PAGE_SIZE).tolist()
        state.submit(NewRequest(f"r{number}", prompt, MAX_TOKENS))
    while len(state.rows.running) < num_requests or not state.rows.is_decoding.all():
        _step(state)
    waiting = rng.integers(0, 50_000, PROMPT).tolist()
    for number in range(num_waiting):
        state.submit(NewRequest(f"w{number}", waiting, MAX_TOKENS))
    for _ in range(3):
        _step(state)
    return state


def _step(state: State) -> tuple[StepPlan, list[float]]:
    """One step; the plan, and seconds of each of PARTS."""
    times = [time.thread_time()]
    decision = decide(state)
    times.append(time.thread_time())
    step = commit(state, decision)
    times.append(time.thread_time())
    assert step is not None
    plan = pack(state, step)
    times.append(time.thread_time())
    result = without_model(plan)
    begin = time.thread_time()
    absorb(state, result)
    parts = np.diff(times).tolist()
    return plan, [*parts, time.thread_time() - begin]


def cost(state: State, num_steps: int = 100) -> tuple[np.ndarray, float]:
    """Median seconds of each of PARTS [4]; those are of the steps' sum; and of one encoding."""
    parts, encodings = [], []
    for _ in range(num_steps):
        plan, times = _step(state)
        parts.append(times)
        begin = time.thread_time()
        encode_plan(plan)
        encodings.append(time.thread_time() - begin)
    measured = np.array(parts)
    typical = np.median(measured.sum(axis=1))
    shares = np.median(measured, axis=0)
    return shares * typical / shares.sum(), float(np.median(encodings))


def main() -> None:
    print(f"{'decoding':>9}{'waiting':>9}" + "".join(f"{part:>9}" for part in PARTS)
          + f"{'sum':>9}{'a row':>9}   (µs, medians)")  # fmt: skip
    for num_requests in (64, 256, 1024, 4096):
        for num_waiting in (0, 1_000, 100_000):
            parts, _ = cost(decoding(num_requests, num_waiting))
            micros = parts * 1e6
            print(f"{num_requests:>9}{num_waiting:>9}" + "".join(f"{x:>9.0f}" for x in micros)
                  + f"{micros.sum():>9.0f}{micros.sum() / num_requests:>9.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
