"""Steps of whole models: eager against graphs, what graphs cost, how busy the device is."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence

import pytest
import torch

from protos.plan import StepPlan, StepResult
from tests.gpu.card import DEVICE, IS_CUDA, has_room, sized
from tests.gpu.conftest import NewTable
from tests.gpu.models import NAMES, PAGE_SIZE, random_loaded, runner_of, weight_bytes
from tests.support.core_driver import CoreDriver
from worker.memory.pool_size import free_memory
from worker.runner import Runner, RunningStep
from worker.step.lanes import settle

BATCHES = sized((1, 8, 64), (1, 3))
CONTEXT = sized(512, 40)
CHUNK = sized(128, 9)  # of a prompt, beside decodes
STEPS = sized(20, 3)
BUSY_STEPS = sized(200, 6)
WARM_UP = 4  # steps


def decodes(runner: Runner, batch: int, steps: int, chunk: int = 0) -> list[StepPlan]:
    """Plans of steady decoding whose tokens are known on the device only; with `chunk`, each
    holds so many tokens of a prompt, too. Attention reads CONTEXT tokens of an empty cache."""
    core = CoreDriver(
        runner.ready(),
        max_batch_tokens=batch * CONTEXT,
        max_requests=batch + 1,
        depth=2,
        allow_block_sharing=False,
        safety_margin=0.0,
    )
    core.submit_prompts(*[[7] * CONTEXT] * batch, max_tokens=steps + 2)
    plans = core.plans_without_model()
    assert len(next(plans).rows) == batch  # the prompts
    if chunk:
        core.limit_tokens(batch + chunk)
        core.submit_prompts([7] * (steps * chunk + 1))
    return list(itertools.islice(plans, steps))


def most_tokens(steps: int) -> int:
    """That one request needs room for, in whole pages."""
    return CONTEXT + steps + PAGE_SIZE


def run(runner: Runner, plans: Sequence[StepPlan], depth: int) -> tuple[float, list[StepResult]]:
    """Seconds for all, with so many steps in flight."""
    results: list[StepResult] = []
    launched: deque[RunningStep] = deque()
    settle(DEVICE)
    begin = time.perf_counter()
    for plan in plans:
        launched.append(runner.launch(plan))
        if len(launched) == depth:
            results.append(launched.popleft().wait())
    results += [step.wait() for step in launched]
    return time.perf_counter() - begin, results


@pytest.mark.parametrize("name", NAMES)
def test_graphs_against_eager(name: str, table: NewTable) -> None:
    """An eager forward is bound by Python; if graphs were not much faster, or gave other tokens,
    something would be wrong with them."""
    if not has_room(2 * weight_bytes(name)):
        pytest.skip(f"{name} does not fit")
    loaded = random_loaded(name)
    tokens = max(BATCHES) * most_tokens(STEPS + WARM_UP) + (STEPS + WARM_UP) * CHUNK + PAGE_SIZE
    times: dict[tuple[str, bool], tuple[float, float]] = {}
    answers: dict[tuple[str, bool], list[list[int]]] = {}
    costs: dict[bool, tuple[float, float]] = {}
    for graphs in (False, True):
        before = free_memory(DEVICE)
        begin = time.perf_counter()
        runner = runner_of(loaded, tokens, graphs=graphs)
        seconds = time.perf_counter() - begin
        costs[graphs] = seconds, before - free_memory(DEVICE) - runner.pool.num_bytes
        if graphs and IS_CUDA:
            assert runner.ready().graph_sizes, "no graph was captured: the log says why"
        for batch in BATCHES:
            for chunk in (0, CHUNK):
                rows = batch - 1 if chunk else batch  # as many requests as graphs have rows for
                if not rows:
                    continue
                what = f"{rows} decodes" + (f" + {chunk} of a prompt" if chunk else "")
                plans = decodes(runner, rows, STEPS + WARM_UP, chunk)
                run(runner, plans[:WARM_UP], 1)
                spent, results = run(runner, plans[WARM_UP:], 1)
                device = sum(result.device_microseconds for result in results)
                times[what, graphs] = spent / STEPS, device / STEPS / 1e6
                answers[what, graphs] = [result.token_ids.tolist() for result in results]
        del runner
    rows = table(
        f"A step of {name}, ms",
        ["step", "eager", "eager, on the device", "graph", "graph, on the device", "same tokens"],
        f"One step at a time, {CONTEXT} tokens of context. Device times of eager steps hold "
        f"the device's waiting for launches.",
    )
    for what in dict.fromkeys(what for what, _ in times):
        cells = [f"{1000 * t:.2f}" for graphs in (False, True) for t in times[what, graphs]]
        rows.add(what, *cells, answers[what, False] == answers[what, True])
    cost = table(f"What a runner of {name} takes beside weights and pool", ["", "seconds", "MiB"])
    for graphs, label in ((False, "eager"), (True, "with graphs")):
        seconds, num_bytes = costs[graphs]
        cost.add(label, f"{seconds:.1f}", f"{num_bytes / 2**20:,.0f}")


def test_the_device_is_busy_in_steady_decode(table: NewTable) -> None:
    """What run-ahead is for: the device must not wait for Python between two steps."""
    name = NAMES[0]
    if not has_room(2 * weight_bytes(name)):
        pytest.skip(f"{name} does not fit")
    loaded = random_loaded(name)
    batch = max(BATCHES)
    runner = runner_of(loaded, batch * most_tokens(BUSY_STEPS), graphs=True)
    rows = table(
        f"How busy the device is: {batch} rows of {name}",
        ["steps in flight", "ms per step", "steps' own time", "kernels' own time"],
        "Shares of the wall clock. A step's own time goes from its first operation to its last; "
        "the kernels' is their sum in a profiled run of fewer steps, against the same steps' wall "
        "time without the profiler.",
    )
    for depth in (1, 2):
        plans = decodes(runner, batch, BUSY_STEPS)
        run(runner, plans[:WARM_UP], depth)
        spent, results = run(runner, plans[WARM_UP:], depth)
        own = sum(result.device_microseconds for result in results) / 1e6
        count = min(50, len(results))
        busy = kernel_seconds(runner, plans[WARM_UP : WARM_UP + count], depth)
        kernels = "unknown" if busy is None else f"{busy / (spent * count / len(results)):.0%}"
        rows.add(depth, f"{1000 * spent / len(results):.2f}", f"{own / spent:.0%}", kernels)


def kernel_seconds(runner: Runner, plans: Sequence[StepPlan], depth: int) -> float | None:
    """What the kernels of these steps take, without gaps; None where the profiler cannot tell."""
    if not IS_CUDA:
        return None
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run(runner, plans, depth)
        events = profile.key_averages()
        kernels = [event for event in events if not event.key.startswith(("Memcpy", "Memset"))]
        microseconds = sum(event.self_device_time_total for event in kernels)
    except (RuntimeError, AttributeError):
        return None
    return microseconds / 1e6 or None
