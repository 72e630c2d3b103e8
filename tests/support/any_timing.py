"""The simulation in any legal timing: results come late, and anything may happen in between.

`Simulation.turn` has one rhythm: plan what may be planned, take one result. Here a seeded choice
says what happens next: a step is planned, one result comes back or all of them, somebody is
aborted, or preempted for no reason, the cache is flushed, a step fails, or the worker dies with
results outstanding.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from scheduler_svc.core.request import NewRequest, Request
from tests.support.check import check
from tests.support.simulation import Outcome, Setup, Simulation, verify

# what may happen next, and how often
MOVES = {
    "plan": 30,
    "deliver_one": 22,
    "deliver_all": 8,
    "abort": 2,
    "preempt": 3,
    "flush": 1,
    "fault": 0.3,
    "death": 0.3,
}


class AnyTiming:
    """Drives a simulation; `seen` counts what happened."""

    def __init__(self, sim: Simulation, rng: np.random.Generator) -> None:
        self.sim = sim
        self.rng = rng
        self.seen: Counter[str] = Counter()
        self._next: list[str] = []

    def move(self) -> None:
        if not self._next:
            chances = np.array(list(MOVES.values())) / sum(MOVES.values())
            self._next = self.rng.choice(list(MOVES), 100, p=chances).tolist()
        name = self._next.pop()
        self.seen[name] += 1
        getattr(self, name)()

    def plan(self) -> None:
        if not self.sim.plan() and not self.sim.results:
            assert not self.sim.state.requests, "wedged: nothing to plan, nothing to wait for"
        self.seen["ahead"] += len(self.sim.results) > 1

    def deliver_one(self) -> None:
        if self.sim.results:
            self.sim.absorb()

    def deliver_all(self) -> None:
        while self.sim.results:
            self.sim.absorb()

    def abort(self) -> None:
        if self.sim.state.requests:
            self.sim.abort(str(self.rng.choice(list(self.sim.state.requests))))

    def preempt(self) -> None:
        running = self._running()
        if running and self.sim.setup.policy != "static":  # which preempts nobody
            victim = running[int(self.rng.integers(len(running)))]
            self.sim.state.preempt([victim])

    def flush(self) -> None:
        self.sim.scheduler.flush_cache()

    def fault(self) -> None:
        self.seen["given_up"] += len(self.sim.results)
        self.sim.fail_step()

    def death(self) -> None:
        self.seen["given_up"] += len(self.sim.results)
        self.sim.lose_worker()

    def _running(self) -> list[Request]:
        return self.sim.state.active()


def run_in_any_timing(
    setup: Setup, requests: list[NewRequest], seed: int
) -> tuple[Outcome, Counter[str]]:
    """Feeds the requests in at random moments; every token of every request is checked."""
    sim = Simulation(setup, seed)
    rng = np.random.default_rng(seed + 1)
    timing = AnyTiming(sim, rng)
    waiting = deque(requests)
    for number in range(1000 * len(requests)):
        if not (waiting or sim.state.requests or sim.results):
            break
        if waiting and rng.random() < 0.2:
            sim.submit(waiting.popleft())
        timing.move()
        if number % 10 == 0:
            check(sim.state)
    else:
        raise AssertionError("nothing gets on")
    verify(requests, sim.run(), setup)
    return sim.outcome, timing.seen
