"""The static baseline: who belongs to a batch, and in which order it is computed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.core.limits import FULL_ATTENTION, Geometry, GroupGeometry, Limits
from scheduler_svc.core.policies import STATIC
from scheduler_svc.core.request import NewRequest
from scheduler_svc.core.scheduler import Scheduler
from tests.support.random_requests import random_requests
from tests.support.simulation import Setup, Simulation, run_workload, verify
from tests.support.without_model import without_model

WORKLOADS = Path(__file__).resolve().parents[1] / "workloads"


def batches(workload: str, num_blocks: int, max_batch_tokens: int) -> list[list[int]]:
    """The requests of every batch of a workload file, by number, in order of admission."""
    geometry = Geometry(16, num_blocks + 2, 1, (GroupGeometry(FULL_ATTENTION, 1, 1),), 8192)
    scheduler = Scheduler(Limits(max_batch_tokens, 64, safety_margin=0.0), geometry, STATIC)
    state = scheduler.state
    for line in (WORKLOADS / f"{workload}.jsonl").read_text().splitlines():
        wanted = json.loads(line)
        scheduler.submit(NewRequest(str(wanted["id"]), wanted["prompt"], wanted["max_new"]))
    found = []
    while state.requests:
        was_empty = not state.rows.running
        plan = scheduler.plan()
        assert plan is not None
        if was_empty:
            found.append([int(request.request_id) for request in state.rows.running.values()])
        scheduler.absorb(without_model(plan))
    return found


@pytest.mark.parametrize(
    ("workload", "num_blocks", "sizes"), [("mixed", 400, [34, 30]), ("equal", 600, [64])]
)
def test_rows_and_pages_bound_a_batch_and_not_the_tokens_of_a_step(
    workload: str, num_blocks: int, sizes: list[int]
) -> None:
    """The baseline is made worse than padded generation by a budget that it does not know, and
    what continuous batching gains looks larger than it is."""
    narrow = batches(workload, num_blocks, 2048)
    assert narrow == batches(workload, num_blocks, 16384)
    assert [len(batch) for batch in narrow] == sizes


def static_simulation(depth: int = 1, **changes: object) -> Simulation:
    defaults: dict[str, object] = {
        "num_blocks": 40,
        "max_batch_tokens": 8,
        "max_requests": 6,
        "max_model_len": 64,
        "policy": "static",
        "max_plans_in_flight": depth,
    }
    return Simulation(Setup(**{**defaults, **changes}))  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_decodes_before_every_prompt_is_computed(depth: int) -> None:
    """Answers that start while prompts of their batch wait are continuous batching in part."""
    sim = static_simulation(depth)
    requests = [NewRequest(f"r{i}", [i + 1] * 7, 6) for i in range(5)]
    for new in requests:
        sim.submit(new)
    first_decode, last_prompt = None, 0
    while sim.state.requests:
        sim.plan()
        for step in sim.state.in_flight:
            if (step.ends - step.num_new_tokens >= 7).any():
                first_decode = step.step_id if first_decode is None else first_decode
            else:
                last_prompt = max(last_prompt, step.step_id)
        if sim.results:
            sim.absorb()
    assert first_decode == last_prompt + 1 == 5, "35 prompt tokens take five steps of eight"
    verify(requests, sim.run(), sim.setup)


def test_who_comes_while_prompts_are_computed_waits_for_the_next_batch() -> None:
    """A padded batch is made up once: it cannot take anybody in later."""
    sim = static_simulation()
    for i in range(3):
        sim.submit(NewRequest(f"r{i}", [i + 1] * 10, 3))
    sim.turn()
    sim.submit(NewRequest("late", [9], 3))
    while "r0" in sim.state.requests:
        assert sim.state.requests["late"][0] in sim.state.pending
        sim.turn()
    sim.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_one_that_leaves_before_its_prompt_is_begun(depth: int) -> None:
    """A row without a computed token is computed on, at a position before its first."""
    sim = static_simulation(depth)
    requests = [NewRequest(f"r{i}", [i + 1] * 8, 4) for i in range(4)]
    for new in requests:
        sim.submit(new)
    sim.plan()
    sim.abort("r3")
    verify(requests, sim.run(), sim.setup)


@pytest.mark.parametrize("groups", [((0, 1),), ((0, 2), (9, 3))], ids=["full", "hybrid"])
@pytest.mark.parametrize("depth", [1, 2])
def test_batches_of_many_prefill_steps_give_every_token(
    groups: tuple[tuple[int, int], ...], depth: int
) -> None:
    """Blocks that were counted for a member are missing when its prompt's turn comes."""
    setup = Setup(
        num_blocks=60,
        max_batch_tokens=24,
        max_model_len=64,
        groups=groups,
        policy="static",
        max_plans_in_flight=depth,
    )
    requests = random_requests(np.random.default_rng(4), 40, prompt=(1, 24), output=(1, 12))
    assert run_workload(setup, requests, seed=4, abort_share=0.3).most_running == 8


def test_a_static_batch_drafts_nothing() -> None:
    """A server under this policy fails on a request that may speculate."""
    sim = Simulation(Setup(policy="static"))
    sim._guess = lambda request: [1, 2]  # type: ignore[method-assign]
    sim.submit(NewRequest("a", [1, 2, 3], 8, speculate=4))
    assert len(sim.run().tokens["a", 0]) == 8
    assert sim.outcome.verified == 0
