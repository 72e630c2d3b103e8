"""What a step schedules: budgets, order, margin, chunking, shortage. Exact steps."""

from __future__ import annotations

import numpy as np
import pytest

from protos.plan import Int32, encode_plan
from scheduler_svc.core.limits import (
    FULL_ATTENTION,
    Geometry,
    GroupGeometry,
    Limits,
    why_never_fits,
)
from scheduler_svc.core.request import NewRequest, Request, RequestState
from scheduler_svc.core.step.batch import Batch
from tests.support.random_requests import random_requests
from tests.support.simulation import Setup, Simulation


def simulation(**changes: object) -> Simulation:
    defaults: dict[str, object] = {
        "num_blocks": 6,
        "page_size": 4,
        "max_batch_tokens": 8,
        "max_requests": 4,
        "max_model_len": 24,
        "safety_margin": 0.0,
        "allow_block_sharing": False,
    }
    sim = Simulation(Setup(**{**defaults, **changes}))  # type: ignore[arg-type]
    sim.state.memory.device.chunks.clean.sort(reverse=True)  # block 2 is taken first
    return sim


def first(sim: Simulation, request_id: str) -> Request:
    return sim.state.requests[request_id][0]


def add(sim: Simulation, request_id: str, prompt: int, max_tokens: int = 4) -> None:
    assert sim.submit(NewRequest(request_id, list(range(1, prompt + 1)), max_tokens)) is not None


def test_prompts_share_the_token_budget_in_order_of_arrival() -> None:
    """Chunked prefill: the last prompt that fits in part is cut, none behind it overtakes."""
    sim = simulation()
    add(sim, "a", 5)
    add(sim, "b", 7)
    add(sim, "c", 1)
    assert sim.peek().tokens == {"a": 5, "b": 3}


def test_decodes_go_first_and_prefills_use_what_is_left() -> None:
    """A long prompt stalls the answers that are running."""
    sim = simulation()
    add(sim, "a", 2)
    sim.turn()
    add(sim, "long", 12)
    assert sim.peek().tokens == {"a": 1, "long": 7}
    sim.turn()
    assert sim.peek().tokens == {"a": 1, "long": 5}


def test_a_prompt_cut_in_chunks_samples_only_at_its_end() -> None:
    """A sample from the middle of a prompt would be delivered as an answer."""
    sim = simulation(max_batch_tokens=4)
    add(sim, "a", 10)
    for _ in range(2):
        sim.turn()
        assert sim.outcome.tokens["a", 0] == []
        assert first(sim, "a").state is RequestState.PREFILLING
    sim.turn()
    assert len(sim.outcome.tokens["a", 0]) == 1
    assert first(sim, "a").state is RequestState.DECODING


def test_blocks_are_taken_in_order_as_tokens_need_them() -> None:
    """A table grows too early (waste) or too late (a write outside of it)."""
    sim = simulation()
    add(sim, "a", 3, max_tokens=6)
    tables = []
    for _ in range(6):
        sim.turn()
        if sim.state.rows.running:
            tables.append(sim.state.memory.tables.of(0, 0).tolist())
    assert tables == [[2], [2], [2, 3], [2, 3], [2, 3]]


def test_below_the_margin_decodes_go_on_and_prefills_wait() -> None:
    """Newcomers take the blocks that running answers are about to need."""
    sim = simulation(safety_margin=0.5)
    add(sim, "a", 8)
    add(sim, "b", 8)
    sim.turn()
    sim.turn()
    add(sim, "c", 1)
    assert sim.state.memory.device.chunks.num_free < 3
    assert first(sim, "b").state is RequestState.PREFILLING
    assert sim.peek().tokens == {"a": 1}


def test_the_first_of_an_empty_batch_passes_the_margin() -> None:
    """A request that needs most of the pool could never start."""
    sim = simulation(safety_margin=0.9)
    add(sim, "a", 20)
    sim.turn()
    assert sim.state.memory.device.chunks.num_free / 6 < 0.9
    assert sim.peek().tokens == {"a": 8}


def test_the_request_limit_holds_and_a_row_is_reused() -> None:
    """More requests than rows: the fifth waits for a row, not for ever."""
    sim = simulation(num_blocks=20)
    for i in range(5):
        add(sim, f"r{i}", 1, max_tokens=2)
    assert list(sim.peek().tokens) == ["r0", "r1", "r2", "r3"]
    sim.turn()
    sim.turn()
    assert list(sim.peek().tokens) == ["r4"]
    sim.run()


def test_the_cache_budget_counts_pages_read() -> None:
    """A step of long contexts takes longer than the budget allows."""
    sim = simulation(num_blocks=20, max_batch_tokens=40, cache_budget=4)
    add(sim, "a", 8)
    add(sim, "b", 8)
    add(sim, "c", 4)
    assert sim.peek().tokens == {"a": 8, "b": 8}
    sim.turn()
    # decoding, a and b read 3 pages each: only one of them per step, nothing is wedged; and c,
    # which would fit, does not overtake b: newcomers could keep it out for ever
    assert sim.peek().tokens == {"a": 1}
    sim.run()


def test_shortage_resets_the_newest_and_goes_on_in_the_same_step() -> None:
    """The oldest starves, or a step is lost while somebody could have run."""
    sim = simulation(num_blocks=6, max_batch_tokens=24)
    add(sim, "a", 11, max_tokens=8)
    add(sim, "b", 11, max_tokens=8)
    sim.turn()
    sim.turn()
    assert sim.state.memory.device.chunks.num_free == 0
    step = sim.peek()
    assert step.soft_resets == ["b"]
    assert step.tokens == {"a": 1}
    sim.turn()
    assert first(sim, "b").state is RequestState.PENDING
    assert first(sim, "b").num_output_tokens == 2, "its tokens are kept"
    sim.run()


def test_newcomers_wait_while_anybody_is_stalled() -> None:
    """A newcomer takes the blocks that were freed for a stalled request."""
    sim = simulation(num_blocks=6, max_batch_tokens=24)
    add(sim, "a", 11, max_tokens=8)
    add(sim, "b", 11, max_tokens=8)
    sim.turn()
    sim.turn()
    add(sim, "c", 1)
    assert sim.peek().tokens == {"a": 1}


def test_the_same_state_gives_the_same_plan() -> None:
    """A step depends on more than the state: on time, or on what was planned elsewhere."""
    sim = simulation()
    add(sim, "a", 5)
    first, second = sim.peek().plan, sim.peek().plan
    assert first is not None
    assert second is not None
    assert encode_plan(first) == encode_plan(second)
    assert sim.state.memory.device.chunks.num_free == 6
    assert len(sim.state.pending) == 1


def test_all_rows_at_once_and_one_by_one_decide_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The array path for decodes forgets a rule that the plain path has."""

    def one_by_one(self: Batch, rows: Int32) -> None:
        for row in rows.tolist():
            self.add_row(row, 1)

    traces = []
    for slow in (False, True):
        if slow:
            monkeypatch.setattr(Batch, "add_decoding", one_by_one)
        sim = Simulation(Setup(num_blocks=40, max_requests=8), 3, keep_trace=True)
        for new in random_requests(np.random.default_rng(3), 30):
            sim.submit(new)
        traces.append(sim.run().trace)
    assert traces[0] == traces[1]


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    """It would wait at the head of the queue for ever."""
    geometry = Geometry(4, 6 + 2, 64, (GroupGeometry(FULL_ATTENTION, 1, 1),), max_model_len=30)
    assert why_never_fits(20, 4, 30, geometry.pool_tokens()) is None
    assert why_never_fits(20, 5, 30, geometry.pool_tokens()) == (
        "prompt (20 tokens) + max_tokens (5) is 25; the whole KV pool holds 24 tokens"
    )
    assert why_never_fits(20, 11, 30, 100) == (
        "prompt (20 tokens) + max_tokens (11) is 31; max_model_len is 30"
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_batch_tokens": 4, "max_requests_per_batch": 5}, "max_requests_per_batch is 5"),
        ({"max_requests_per_batch": 0}, "max_requests_per_batch is 0"),
        ({"safety_margin": 1.0}, "safety_margin is 1.0"),
        ({"max_plans_in_flight": 3}, "max_plans_in_flight is 3"),
        ({"target_step_ms": -1.0}, "target_step_ms is -1.0"),
        ({"target_step_ms": float("nan")}, "target_step_ms is nan"),
    ],
)
def test_limits_name_what_is_wrong(changes: dict[str, int], named: str) -> None:
    """A limit that wedges the scheduler is only noticed under load."""
    with pytest.raises(ValueError, match=named):
        Limits(**{"max_batch_tokens": 8, "max_requests_per_batch": 4, **changes})  # type: ignore[arg-type]


def test_a_burst_leaves_most_of_the_margin() -> None:
    """The margin is looked at once a step, a burst takes all of it, and answers are preempted."""
    sim = simulation(
        num_blocks=60, max_batch_tokens=400, max_requests=40, max_model_len=200, safety_margin=0.3
    )
    for number in range(30):
        add(sim, f"r{number}", 8)
    # two blocks each: the 25th finds 12 of 60 free, as many as two thirds of the margin
    assert len(sim.peek().admitted) == 25
