"""Seeded random lives of an engine with a shadow worker: everything that can happen, at any moment.

A life draws a memory, a policy and limits, then moves: requests come (siblings, stop strings, stop
tokens, poisons, ids in use or used before), are aborted; steps fail; workers die, leave, fall
silent and come back with memory of another size; results come late, twice or wrong; the cache is
flushed. After every turn `check` looks at the whole state, and a witness (life_witness.py) at all
that clients were told. One seed is one life, move for move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from protos import link_pb2
from protos.plan import StepResult
from scheduler_svc.core.limits import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    Geometry,
    GroupGeometry,
)
from scheduler_svc.core.policies import POLICIES, STATIC
from scheduler_svc.core.request import RequestState
from scheduler_svc.core.state import InFlight
from scheduler_svc.engine.views import get_cache, list_requests
from tests.support.check import check
from tests.support.engine_harness import Bench, assert_nothing_is_held
from tests.support.expected_answers import expected_tokens
from tests.support.life_witness import LETTERS, Asked, Witness, letter

# (sliding window or 0, blocks a chunk) of each cache group
GROUPS = [((0, 1),), ((0, 3),), ((5, 1),), ((0, 2), (5, 3)), ((0, 1), (4, 1), (7, 1))]
VOCABULARY = 50  # of the shadow worker


class Life:
    """See the module's docstring; `run` ends with everything checked, or an AssertionError."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.groups = GROUPS[self.draw(len(GROUPS))]
        self.policy = list(POLICIES.values())[self.draw(len(POLICIES))]
        self.num_rows = 2 + self.draw(6)
        self.max_queue_size = self.draw(4) if self.happens(0.2) else 0
        self.bench = Bench(
            depth=1 + self.draw(2),
            max_queue_size=self.max_queue_size,
            geometry=self.draw_geometry(),
            policy=self.policy,
            num_rows=self.num_rows,
            max_batch_tokens=self.num_rows + self.draw(20),
            allow_block_sharing=self.happens(0.7),
            cache_budget=3 + self.draw(12) if self.happens(0.3) else 0,
            target_step_ms=1.0 + self.draw(20) if self.happens(0.5) else 0.0,
        )
        self.poisons = ["fault", "death"] if self.happens(0.5) else []
        self.num_asked = 0
        self.witness = Witness(self.bench)
        self.happened = self.witness.happened
        self.is_loading = False  # a worker that has said Hello
        self.late: list[StepResult] = []  # of plans that were given up or answered

    def draw(self, end: int) -> int:
        return int(self.rng.integers(end))

    def happens(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def draw_geometry(self) -> Geometry:
        return Geometry(
            page_size=2 + self.draw(4),
            num_chunks=2 + 12 + self.draw(20),
            chunk_bytes=64,
            groups=tuple(
                GroupGeometry(SLIDING_ATTENTION if window else FULL_ATTENTION, 1, blocks, window)
                for window, blocks in self.groups
            ),
            max_model_len=40,
            num_swap_chunks=[0, 5, 40][self.draw(3)],
            overlaps_swap=self.happens(0.5),
        )

    # The moves

    def run(self, num_moves: int = 120) -> None:
        self.bench.connect()
        moves = [
            (0.34, self.turn),
            (0.34, self.answer),
            (0.18, self.submit),
            (0.03, self.abort),
            (0.008, self.fail_step),
            (0.012, self.lose_worker),
            (0.01, self.say_something_odd),
            (0.01, self.flush),
            (0.02, self.ask),
        ]
        weights = np.array([weight for weight, _ in moves])
        for move in self.rng.choice(len(moves), num_moves, p=weights / weights.sum()).tolist():
            moves[move][1]()
        for _ in range(5000):
            self.turn()
            self.answer()
            if not self.witness.told and not self.bench.link.plans:
                break
        assert not self.witness.told, f"no end: {self.witness.told}"
        self.turn()
        assert_nothing_is_held(self.bench)
        suspects = self.bench.engine._state.suspects
        assert not suspects.is_active, f"suspicion outlives the suspects: {suspects}"

    def turn(self) -> None:
        if self.bench.link.is_dropped:  # no worker is there, whatever the engine believes
            self.bench.now += 8  # workers that come and go have to wait
            self.say_hello()
        elif self.is_loading and self.happens(0.5):
            self.become_ready()
        self.bench.turn()
        state = self.bench.engine._state
        check(state)
        assert not any(request.was_wedged for request in state.live()), "wedged"
        self.witness.read_events()

    def say_hello(self) -> None:
        """A worker comes, perhaps with memory of another size."""
        if self.happens(0.5):
            self.bench.link.geometry = self.draw_geometry()
            self.witness.memory_changes()
        self.late.clear()  # of another session: the link would drop them
        self.bench.link.hello()
        self.is_loading = True

    def become_ready(self) -> None:
        if self.bench.engine.status.is_ready:
            self.count_failure()  # the one that takes over may be there because the other died
        self.bench.link.ready()
        self.is_loading = False

    def answer(self) -> None:
        """The oldest plan, unless a poison shows in it; read with the next turn."""
        for _ in range(1 + self.draw(2)):
            if not self.bench.link.plans:
                return
            step = self.oldest_step()
            poisons = [] if step is None else self.poisons_in(step)
            if poisons:
                self.happened[f"{poisons[0].poison} by a poison"] += 1
                self.fail(step, poisons, poisons[0].poison)
                return
            plan = self.bench.link.plans.popleft()
            result = self.bench.link.worker.step(plan)
            # a device of no constant speed
            microseconds = int((1 + len(plan.token_ids)) * 10 ** (4 * self.rng.random()))
            result = replace(result, device_microseconds=microseconds)
            self.bench.link.worker.finish(result.step_id)
            self.bench.link.say_result(result)
            self.late = [*self.late[-3:], result]

    def oldest_step(self) -> InFlight | None:
        step_id = self.bench.link.plans[0].step_id
        steps = [s for s in self.bench.engine._state.in_flight if s.step_id == step_id]
        return steps[0] if steps else None

    def poisons_in(self, step: InFlight) -> list[Asked]:
        found = []
        for request, end in step.reaches():
            asked = self.witness.of[request]
            is_live = request.state is not RequestState.FINISHED
            if is_live and asked.poison and end >= asked.place and asked not in found:
                found.append(asked)
        return found

    def fail(self, step: InFlight | None, guilty: list[Asked], how: str) -> None:
        """The oldest plan fails, or kills the worker."""
        is_silent = how == "death" and self.happens(0.5)
        if is_silent:
            self.bench.turn()  # else a result that is on its way would count as heard of later
        if not guilty:
            self.count_failure([step] if step is not None and how == "fault" else None)
        if how == "fault":
            self.bench.link.fault("RuntimeError: out of luck")
        elif is_silent:
            self.bench.now += 6
            self.bench.turn()
        else:
            self.bench.link.say(bye=link_pb2.Bye(reason="the device failed", is_failure=True))
        self.bench.turn()
        self.witness.read_events()

    def count_failure(self, steps: Sequence[InFlight] | None = None) -> None:
        """Of these steps, or of all in flight, through nobody's fault."""
        for step in self.bench.engine._state.in_flight if steps is None else steps:
            for asked in dict.fromkeys(self.witness.of[request] for request in step.requests):
                asked.num_failures += 1

    def submit(self) -> None:
        for _ in range(1 + self.draw(3)):
            asked = self.draw_request()
            self.witness.submitted.append(asked)
            self.bench.submit(
                asked.request_id,
                asked.prompt,
                asked.max_tokens,
                asked.stop,
                asked.stop_token_ids,
                self.temperature,
                self.seed,
                n=asked.n,
                priority=asked.priority,
                cache_salt="salt" if self.happens(0.1) else "",
            )

    def draw_request(self) -> Asked:
        self.num_asked += 1
        is_known = self.happens(0.1)  # an id that was used before, perhaps a live one
        number = self.draw(self.num_asked) if is_known else self.num_asked
        vocabulary = 2 if self.happens(0.7) else VOCABULARY  # so that prefixes collide
        prompt = self.rng.integers(0, vocabulary, 1 + self.draw(20)).tolist()
        max_tokens = 1 + self.draw(12)
        n = 2 + self.draw(2) if self.happens(0.25) and self.policy is not STATIC else 1
        n = min(n, self.num_rows)
        stop = letter(self.draw(LETTERS)) if self.happens(0.4) else ""
        stops = frozenset(self.rng.integers(0, VOCABULARY, 3).tolist() if self.happens(0.3) else [])
        self.temperature, self.seed = float(self.draw(2)), int(self.rng.integers(2**62))
        right = expected_tokens(
            [prompt] * n, [max_tokens] * n, VOCABULARY, [self.temperature] * n, [self.seed] * n,
            [stops] * n, [window for window, _ in self.groups], list(range(n)),
        )  # fmt: skip
        for tokens in right:
            ends = [i for i, token in enumerate(tokens) if stop and letter(token) == stop]
            del tokens[ends[0] + 1 if ends else len(tokens) :]
        is_poison = bool(self.poisons) and self.happens(0.1)
        return Asked(
            request_id=f"r{number}",
            prompt=prompt,
            max_tokens=max_tokens,
            n=n,
            stop=stop,
            stop_token_ids=stops,
            priority=self.draw(3),
            poison=self.poisons[self.draw(2)] if is_poison else "",
            place=1 + self.draw(len(prompt) + max_tokens - 1),
            right=right,
        )

    def abort(self) -> None:
        ids = [*self.witness.told, "nobody"]
        self.bench.engine.abort([ids[self.draw(len(ids))], ids[self.draw(len(ids))]])

    def fail_step(self) -> None:
        """For no reason that would come again."""
        if self.bench.link.plans and (step := self.oldest_step()) is not None:
            self.happened["fault"] += 1
            plans = list(self.bench.link.plans)[: 1 + self.draw(2)]
            late = [self.bench.link.worker.step(plan) for plan in plans]
            self.fail(step, [], "fault")
            for result in late:  # a worker that had more than one step under way
                self.bench.link.say_result(result)

    def lose_worker(self) -> None:
        how = ["silence", "bye", "another", "failure"][self.draw(4)]
        self.happened[how] += 1
        if how in ("silence", "failure"):
            self.fail(None, [], "death")
        elif how == "bye":
            self.bench.link.say(bye=link_pb2.Bye(reason="told to stop"))
        else:
            self.say_hello()
        for result in self.late:
            self.bench.link.say_result(result)

    def say_something_odd(self) -> None:
        link = self.bench.link
        if self.late and self.happens(0.4):
            self.happened["late result"] += 1
            self.bench.link.say_result(self.late[self.draw(len(self.late))])
        elif link.plans and self.oldest_step() is not None:
            self.happened["wrong result"] += 1
            result = link.worker.step(link.plans.popleft())
            tokens = result.token_ids
            wrong = [
                replace(result, step_id=result.step_id + 1),
                replace(result, token_ids=np.append(tokens, np.int32(1))),
                replace(result, token_ids=np.full(max(1, len(tokens)), -1, np.int32)),
                replace(result, token_ids=np.full(max(1, len(tokens)), 2**31 - 1, np.int32)),
                replace(result, is_finite=result.is_finite[:-1]),
                replace(result, is_finite=result.is_finite + np.int32(2)),
            ]
            self.count_failure()
            self.bench.link.say_result(wrong[self.draw(len(wrong))])
            self.turn()

    def flush(self) -> None:
        self.bench.engine.flush_cache()

    def ask(self) -> None:
        self.bench.ask(get_cache)
        listed = self.bench.ask(list_requests)
        assert len(listed) == min(100, self.bench.engine._state.num_live)
        self.witness.read_events()
