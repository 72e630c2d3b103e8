"""Beam searches beside other requests: whatever happens, each finds what it finds alone.

The shadow worker computes each candidate's log probability from the row's whole history as read
back through its block table, so that a wrong exchange of beams shows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.request import BeamSearch, NewRequest, Sampling
from tests.support.any_timing import run_in_any_timing
from tests.support.random_requests import random_requests
from tests.support.simulation import Setup, run_workload

HYBRID = ((0, 2), (9, 3))
TIGHT = Setup(num_blocks=24, max_model_len=64, max_requests=6, vocab_size=20)
SETUPS = {
    "ample": Setup(num_blocks=300, vocab_size=20),
    "reset": TIGHT,
    "swap": replace(TIGHT, swap_chunks=30, overlaps_swap=True),
    "swap_first": replace(TIGHT, swap_chunks=30),
    "no_sharing": replace(TIGHT, allow_block_sharing=False),
    "hybrid": replace(TIGHT, num_blocks=40, groups=HYBRID, swap_chunks=10),
    "sliding": replace(TIGHT, num_blocks=24, groups=((7, 1),), swap_chunks=10),
    "small_budget": replace(TIGHT, max_batch_tokens=7, swap_chunks=10),
    "cache_budget": replace(TIGHT, cache_budget=16),
    "priority": replace(TIGHT, policy="priority", swap_chunks=20),
    "prefill_first": replace(TIGHT, policy="prefill_first"),
}


def drawn(setup: Setup, seed: int, count: int, beam_share: float = 0.5) -> list[NewRequest]:
    rng = np.random.default_rng(seed)
    return random_requests(
        rng, count, vocab_size=setup.vocab_size, prefixes=3, priorities=3, special_share=0.6,
        fork_share=0.1, speculate_share=0.2, prompt=(1, 24), output=(1, 24), beam_share=beam_share,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "depth"), [(name, 1 + n % 2) for n, name in enumerate(SETUPS)])
def test_beside_others(name: str, depth: int) -> None:
    """A beam takes its parent's tokens without its KV, or the reverse; a group is only partly
    preempted, or partly admitted, and waits for ever."""
    setup = replace(SETUPS[name], max_plans_in_flight=depth)
    outcome = run_workload(setup, drawn(setup, depth, 20), seed=depth, abort_share=0.1)
    assert len(outcome.beam_scores) > 5
    assert outcome.tail_copies > 10
    assert outcome.histories


@pytest.mark.parametrize("name", SETUPS)
def test_in_any_timing(name: str) -> None:
    """Workers die and steps fail between the candidates of one beam and the next; a preempted group
    returns while a plan still names one of its rows."""
    setup = replace(SETUPS[name], max_plans_in_flight=2)
    outcome, seen = run_in_any_timing(setup, drawn(setup, 3, 18), seed=3)
    assert seen["ahead"]
    assert outcome.beam_scores


def search(prompt: int, output: int, width: int, vocab: int = 20) -> NewRequest:
    tokens = np.random.default_rng(prompt).integers(vocab, size=prompt).tolist()
    beams = BeamSearch(width, width, vocab_size=vocab)
    return NewRequest("b", tokens, output, Sampling(stop_token_ids=frozenset({3})), beams=beams)


@pytest.mark.parametrize(
    ("groups", "depth"),
    [(((0, 1),), 2), (((0, 2), (9, 3)), 1), (((7, 1),), 1), (((0, 1), (5, 1), (9, 2)), 2)],
)
def test_the_smallest_pool_that_is_promised_suffices(
    groups: tuple[tuple[int, int], ...], depth: int
) -> None:
    """A search is accepted that stalls for ever, alone or beside others."""
    rng = np.random.default_rng(depth)
    for number in range(4):
        prompt, output, width = (
            int(rng.integers(low, high)) for low, high in ((1, 25), (2, 25), (2, 6))
        )
        setup = Setup(
            groups=groups, max_model_len=64, max_plans_in_flight=depth, vocab_size=20,
            max_batch_tokens=8, max_requests=6, allow_block_sharing=number % 3 != 2,
            swap_chunks=10 * (number % 2),
        )  # fmt: skip
        chunks = setup.geometry().chunks_at_most(prompt + output, False, width, prompt)
        setup = replace(setup, num_blocks=chunks)
        new = search(prompt, output, width)
        assert run_workload(setup, [new]).beam_scores
        others = drawn(setup, number, 6, beam_share=0.3)
        outcome = run_workload(setup, [*others[:3], new, *others[3:]], seed=number)
        assert ("b", 0) in outcome.beam_scores
