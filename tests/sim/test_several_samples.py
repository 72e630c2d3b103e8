"""Rows that sample nothing, and rows that sample several tokens to verify guesses.

No request of the API does either yet. The shadow worker plays them: some requests only compute
their prompts; others guess their next tokens, right or wrong, and a step verifies up to 3 guesses
with 4 samples. Whatever is guessed, the tokens are those of a run without guesses.
"""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.core.request import FinishReason, NewRequest, Sampling
from tests.support.any_timing import run_in_any_timing
from tests.support.check import check
from tests.support.random_requests import random_requests
from tests.support.simulation import Setup, Simulation, run_workload

GROUPS = [((0, 1),), ((0, 2), (8, 3)), ((6, 1),)]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "priority"])
def test_guesses_change_no_token(
    groups: tuple[tuple[int, int], ...], depth: int, policy: str
) -> None:
    """A rejected token stays in the answer, in the KV, or under a name of the prefix cache."""
    setup = Setup(
        num_blocks=10 if groups[0][0] else 22, groups=groups, max_plans_in_flight=depth,
        policy=policy, swap_chunks=16, vocab_size=8, max_requests=24,
    )  # fmt: skip
    rng = np.random.default_rng(depth)
    requests = random_requests(
        rng, 60, prefixes=3, fork_share=0.2, speculate_share=0.6, score_share=0.15, vocab_size=8,
        priorities=3,
    )  # fmt: skip
    outcome = run_workload(setup, requests, seed=depth, abort_share=0.1)
    assert outcome.verified > 200
    assert 50 < outcome.rejected < outcome.verified
    assert outcome.counters.soft_resets + outcome.counters.offloads > 0


@pytest.mark.parametrize("seed", range(12))
def test_in_any_timing(seed: int) -> None:
    """A verdict comes when its row has been preempted, aborted, or given to somebody else."""
    setup = Setup(
        num_blocks=30, groups=GROUPS[seed % 3], max_plans_in_flight=2, swap_chunks=10 * (seed % 2),
        vocab_size=4, overlaps_swap=seed % 2 == 1, max_requests=24,
        policy=["fifo", "prefill_first", "priority"][seed // 2 % 3],
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    requests = random_requests(
        rng, 30, speculate_share=0.7, score_share=0.2, vocab_size=4, prefixes=2, fork_share=0.2
    )
    outcome, _ = run_in_any_timing(setup, requests, seed)
    assert outcome.verified > 20


def test_a_rejected_tail_is_returned_and_has_no_name() -> None:
    """Blocks leak with every wrong guess, or others share what was never said."""
    setup = Setup(num_blocks=20, page_size=2, allow_block_sharing=True)
    sim = Simulation(setup)
    tokens = run_alone()
    sim._guess = (
        lambda request: [  # type: ignore[method-assign]
            (token + 1) % setup.vocab_size for token in tokens[request.num_output_tokens :][:3]
        ]
    )
    sim.submit(NewRequest("a", [1, 2, 3], 12, speculate=3))
    sim.turn()
    (request,) = sim.state.requests["a"]
    assert sim.plan()
    memory = sim.state.memory
    assert memory.tables.end[0, request.row] == 4  # 3 + 1 + 3 tokens
    sim.absorb()
    assert request.num_output_tokens == 2, "only the sample before the first guess counts"
    assert sim.state.rows.computed[request.row] == len(request.token_ids) - 1
    assert memory.tables.end[0, request.row] == 2
    assert len(memory.groups[0].name_of) == 2
    check(sim.state)


def test_a_right_guess_saves_steps() -> None:
    """Verification accepts one token a step, or stops at a chance match."""
    setup, counts = Setup(), []
    for speculate in (0, 3):
        sim = Simulation(setup)
        sim.rng = np.random.default_rng(1)
        sim.submit(NewRequest("a", [1, 2, 3], 21, speculate=speculate))
        sim._guess = lambda r, sim=sim: sim._answers["a", 0][r.num_output_tokens :]  # type: ignore
        sim._answers = {("a", 0): run_alone()}
        counts.append(sim.run().steps)
    assert counts == [21, 6]


def test_a_row_without_drafts_is_planned_ahead() -> None:
    """A request that may speculate, but finds nothing to guess, loses what run-ahead gives."""
    sim = Simulation(Setup(max_plans_in_flight=2))
    tokens = run_alone()
    # nothing for the first ten tokens, then all that is right
    sim._guess = lambda r: tokens[r.num_output_tokens :][:3] * (r.num_output_tokens >= 10)  # type: ignore
    sim.submit(NewRequest("a", [1, 2, 3], 21, speculate=3))
    in_flight, verified = [], []
    while sim.state.requests:
        while sim.plan():
            pass
        in_flight.append(len(sim.state.in_flight))
        verified.append(sum(len(step.drafts) for step in sim.state.in_flight))
        sim.absorb()
    assert in_flight == [2] * 10 + [1] * 4, "held back, or planned ahead of a verdict"
    assert verified == [0] * 11 + [1] * 3
    assert sim.outcome.tokens["a", 0] == tokens


def test_drafts_take_nothing_from_others() -> None:
    """A request with long drafts starves its neighbours, costs one its KV, or asks the worker for
    more samples than it has buffers."""
    sim = Simulation(Setup(max_batch_tokens=6, max_requests=6))
    for name in "abcd":
        sim.submit(NewRequest(name, [ord(name) % 50, 2, 3], 20, speculate=3))
    while sim.state.requests:
        decoding = [request for request in sim.state.active() if request.num_output_tokens]
        assert sim.plan()
        step = sim.state.in_flight[-1]
        assert len(step.sampled) <= 6
        assert set(decoding) <= set(step.requests), "a decoding row found no place"
        sim.absorb()
    assert sim.outcome.counters.soft_resets == 0
    assert sim.outcome.verified > 0


def test_samples_are_told_apart_beside_a_fork() -> None:
    """Siblings' samples stand behind all others: a wrong guess is compared with one of theirs."""
    setup = Setup(max_batch_tokens=16, max_requests=12, policy="prefill_first")
    prompt, right = [1, 2, 3], Simulation(setup)
    right.submit(NewRequest("a", prompt, 20))
    tokens = right.run().tokens["a", 0]
    sim = Simulation(setup)
    sim._guess = lambda request: [  # type: ignore[method-assign]
        (tokens[request.num_output_tokens] + 1) % setup.vocab_size
    ]
    sim.submit(NewRequest("a", prompt, 20, speculate=1))
    sim.turn()
    sim.submit(NewRequest("b", list(range(20)), 2, Sampling(1.0), n=6))
    assert sim.run().tokens["a", 0] == tokens
    assert sim.outcome.rejected > 0


def run_alone() -> list[int]:
    sim = Simulation(Setup())
    sim.submit(NewRequest("a", [1, 2, 3], 21))
    return sim.run().tokens["a", 0]


def test_a_request_that_only_scores_ends_by_length() -> None:
    """It waits for a sample that never comes; or its prompt's KV is not there for the next one."""
    sim = Simulation(Setup(max_batch_tokens=8))
    prompt = list(range(20))
    sim.submit(NewRequest("a", prompt, 0))
    sim.run()
    assert sim.outcome.tokens["a", 0] == []
    assert sim.outcome.reasons["a", 0] is FinishReason.LENGTH
    assert sim.outcome.steps == 3
    sim.submit(NewRequest("b", prompt, 1))
    assert sim.run().cached_tokens["b", 0] == 16
