"""Penalties, biases, bans, grammars, log probabilities, drafts and resumed answers, all at once.

Every bit of a sample's context changes the token that the shadow worker samples, so that a wrong
history, ban or mask shows, whatever happens to the request meanwhile.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.request import NewRequest, Sampling
from tests.support.any_timing import run_in_any_timing
from tests.support.random_requests import random_requests, some_resumed
from tests.support.simulation import Setup, run_workload

HYBRID = ((0, 2), (9, 3))
TIGHT = Setup(num_blocks=18, max_model_len=64, max_requests=6, vocab_size=20)
SETUPS = {
    "ample": Setup(num_blocks=200, vocab_size=20),
    "reset": TIGHT,
    "swap": replace(TIGHT, swap_chunks=30, overlaps_swap=True),
    "few_logits": replace(TIGHT, num_blocks=40, max_requests=5, max_logits=8),
    "all_logits": replace(TIGHT, num_blocks=40, max_requests=8, max_logits=8, max_batch_tokens=8),
    "hybrid": replace(TIGHT, num_blocks=12, groups=HYBRID, swap_chunks=10),
    "sliding": replace(TIGHT, num_blocks=16, groups=((7, 1),), swap_chunks=10),
    "small_budget": replace(TIGHT, max_batch_tokens=7, swap_chunks=10),
    "priority": replace(TIGHT, policy="priority", swap_chunks=20),
    "prefill_first": replace(TIGHT, policy="prefill_first"),
    "static": replace(TIGHT, policy="static", num_blocks=60),
}


def drawn(setup: Setup, seed: int, count: int) -> list[NewRequest]:
    """Many requests of every kind."""
    rng = np.random.default_rng(seed)
    is_static = setup.policy == "static"
    requests = random_requests(
        rng, count, vocab_size=setup.vocab_size, prefixes=3, priorities=3, special_share=0.7,
        fork_share=0.0 if is_static else 0.15, speculate_share=0.0 if is_static else 0.3,
        score_share=0.1,
    )  # fmt: skip
    windows = [window for window, _ in setup.groups]
    return some_resumed(rng, requests, 0.2, setup.vocab_size, windows)


@pytest.mark.parametrize(
    ("name", "depth"), [("ample", 1), ("swap", 1), *((name, 2) for name in SETUPS)]
)
def test_everything_at_once(name: str, depth: int) -> None:
    """A sample does not know a token before it, or knows one that was never there; a score is lost,
    doubled, or another token's; an answer breaks its grammar or its minimal length."""
    setup = replace(SETUPS[name], max_plans_in_flight=depth)
    requests = drawn(setup, depth, 40)
    outcome = run_workload(setup, requests, seed=depth, abort_share=0.1)
    assert outcome.histories > 20
    assert outcome.bans > 20
    assert outcome.masks > 20
    assert outcome.scored > 20
    assert bool(outcome.late_masks) == (depth == 2)
    assert outcome.verified or setup.policy == "static"


@pytest.mark.parametrize("name", SETUPS)
def test_in_any_timing(name: str) -> None:
    """Workers die and steps fail between a score and the next; results come when their row has been
    preempted, aborted or given away; a mask comes late. Nothing of it shows in an answer."""
    setup = replace(SETUPS[name], max_plans_in_flight=2)
    outcome, seen = run_in_any_timing(setup, drawn(setup, 3, 20), seed=3)
    assert seen["ahead"]
    assert outcome.late_masks
    assert outcome.scored


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SETUPS)
def test_many_timings(name: str) -> None:
    """The same with many seeds: rare orders of events."""
    for seed in range(25):
        setup = replace(SETUPS[name], max_plans_in_flight=2)
        run_in_any_timing(setup, drawn(setup, 100 + seed, 40), seed)


def test_drafts_and_grammars_change_nothing_else() -> None:
    """Speculation changes the tokens of an answer with penalties and bans."""
    sampling = Sampling(
        temperature=1.0, seed=3, repetition_penalty=1.3, presence_penalty=0.5, min_tokens=9,
        bad_words=((1, 2), (3,)), stop_token_ids=frozenset({4, 5}), logprobs=2,
    )  # fmt: skip
    new = NewRequest("a", [1, 2, 3, 1], 30, sampling, is_constrained=True)
    setup = Setup(vocab_size=12)
    plain = run_workload(setup, [new])
    drafted = run_workload(setup, [replace(new, speculate=4)])
    assert drafted.verified
    assert drafted.steps < plain.steps
    assert (drafted.tokens, drafted.scores) == (plain.tokens, plain.scores)
