"""A long simulation of everything at once: `python -m tests.bench.million [--steps 1000000]`.

Random arrivals in waves, aborts, priorities, forks, shared prefixes, penalties, biases, grammars,
log probabilities, drafts, resumed answers and shortage, over a hybrid memory with a small swap pool
that is copied beside the steps, two plans in flight, results at any moment, workers that fail and
die; every answer is checked as its request ends, the rows of every step, and the whole state every
100 steps. Prints what happened.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field, replace

import numpy as np

from scheduler_svc.core.request import FinishReason, NewRequest
from tests.support.any_timing import AnyTiming
from tests.support.expected_answers import expected_answers
from tests.support.random_requests import random_requests, some_resumed
from tests.support.simulation import Setup, Simulation, verify_answer

SETUP = Setup(
    num_blocks=90,
    page_size=4,
    groups=((0, 2), (9, 3)),
    swap_chunks=30,
    overlaps_swap=True,
    max_batch_tokens=64,
    max_requests=16,
    max_model_len=64,
    max_logits=48,
    max_plans_in_flight=2,
    policy="priority",
    vocab_size=50,
)
WAVE = 500  # requests that are made, and checked, together


@dataclass
class Tally:
    steps: int = 0
    requests: int = 0
    tokens: int = 0
    aborts: int = 0
    deaths: int = 0
    forks: int = 0
    cached_tokens: int = 0
    scores: int = 0  # tokens with log probabilities
    late_masks: int = 0
    verified: int = 0  # draft tokens
    histories: int = 0
    counters: dict[str, int] = field(default_factory=dict)


def run(steps: int, seed: int = 0, setup: Setup = SETUP, show: bool = False) -> Tally:
    """Runs at least so many steps, to the end of the last wave."""
    rng = np.random.default_rng(seed)
    simulation = Simulation(setup, seed)
    timing = AnyTiming(simulation, rng)
    tally = Tally()
    started = time.monotonic()
    while simulation.outcome.steps < steps:
        _wave(simulation, timing, rng, tally)
        if show:
            rate = simulation.outcome.steps / (time.monotonic() - started)
            print(
                f"\r{simulation.outcome.steps:,} of {steps:,} steps, {rate:,.0f} a second",
                end="",
                file=sys.stderr,
                flush=True,
            )
    if show:
        print(file=sys.stderr)
    simulation.run()
    tally.steps = simulation.outcome.steps
    tally.forks = simulation.outcome.forks
    tally.deaths = simulation.outcome.lost_workers
    tally.late_masks = simulation.outcome.late_masks
    tally.verified = simulation.outcome.verified
    tally.histories = simulation.outcome.histories
    counters = simulation.state.counters
    tally.counters = {name: getattr(counters, name) for name in counters.__slots__}
    return tally


def _wave(
    simulation: Simulation, timing: AnyTiming, rng: np.random.Generator, tally: Tally
) -> None:
    setup = simulation.setup
    requests = [
        replace(new, request_id=f"{tally.requests + i}")
        for i, new in enumerate(
            random_requests(
                rng,
                WAVE,
                prompt=(1, 30),
                output=(1, 30),
                vocab_size=setup.vocab_size,
                prefixes=5,
                fork_share=0.1,
                priorities=3,
                speculate_share=0.1,
                score_share=0.05,
                special_share=0.3,
            )
        )
    ]
    windows = [window for window, _ in setup.groups]
    requests = some_resumed(rng, requests, 0.1, setup.vocab_size, windows)
    tally.requests += WAVE
    waiting = list(reversed(requests))
    rate = float(rng.choice([0.3, 1.0, 4.0]))  # requests a move: idle, busy, flooded
    while waiting or len(simulation.state.requests) > 4:
        for _ in range(min(len(waiting), int(rng.poisson(rate)))):
            assert simulation.submit(waiting.pop()) is not None
        timing.move()
    simulation.run()
    _check_wave(simulation, requests, tally)


def _check_wave(simulation: Simulation, requests: list[NewRequest], tally: Tally) -> None:
    """All tokens of the wave, which has ended; then forgets it."""
    outcome = simulation.outcome
    windows = [window for window, _ in simulation.setup.groups]
    family = [(new, new.index + number) for new in requests for number in range(new.n)]
    answers = expected_answers(family, simulation.setup.vocab_size, windows)
    for (new, index), right in zip(family, answers, strict=True):
        who = new.request_id, index
        verify_answer(new, index, right, outcome)
        tally.scores += len(outcome.scores.pop(who)) + len(outcome.prompt_scores.pop(who))
        tally.aborts += outcome.reasons.pop(who) is FinishReason.ABORT
        tally.tokens += len(outcome.tokens.pop(who))
        tally.cached_tokens += outcome.cached_tokens.pop(who)
    simulation.forget_guesses()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.million", description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(run(options.steps, options.seed, show=True))


if __name__ == "__main__":
    main()
