"""The core with a worker that only takes time, on a virtual clock: who waits how long for what.

A step begins when its plan is there and the step before has ended, as on a device; the plan is
there as soon as the core may make it. Nothing is computed: every token is 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from protos.plan import StepResult, encode_plan
from scheduler_svc.core.limits import FULL_ATTENTION, Geometry, GroupGeometry, Limits
from scheduler_svc.core.policies import FIFO, Policy
from scheduler_svc.core.request import NewRequest
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import InFlight, State
from scheduler_svc.core.step_time import keys_read


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds that a step costs, and for each of its tokens, and for each key that they read."""

    base: float
    per_token: float
    per_key: float

    def __call__(self, step: InFlight) -> float:
        keys = keys_read(step.num_new_tokens, step.ends).sum()
        return float(self.base + self.per_token * step.num_new_tokens.sum() + self.per_key * keys)


SLOW_CPU = Speed(base=0.03, per_token=2.6e-3, per_key=0.9e-6)
FAST_GPU = Speed(base=4e-3, per_token=8e-6, per_key=0.4e-9)


@dataclass(slots=True)
class Step:
    """A step that has ended."""

    began: float
    ended: float
    num_tokens: int
    num_decoding: int


@dataclass
class TimedRun:
    """`speed` may be changed while it runs."""

    limits: Limits
    speed: Callable[[InFlight], float]
    policy: Policy = FIFO
    num_blocks: int = 4000
    max_model_len: int = 16384
    now: float = 0.0
    steps: list[Step] = field(default_factory=list)
    tokens_at: dict[str, list[float]] = field(default_factory=dict)  # request → when each came
    trace: list[bytes] = field(default_factory=list)  # every plan

    def __post_init__(self) -> None:
        group = GroupGeometry(FULL_ATTENTION, 1, 1)
        geometry = Geometry(16, self.num_blocks + 2, 1, (group,), self.max_model_len)
        self.scheduler = Scheduler(self.limits, geometry, self.policy)
        self._running: deque[tuple[Step, StepResult]] = deque()

    @property
    def state(self) -> State:
        return self.scheduler.state

    def submit(self, request_id: str, num_prompt_tokens: int, max_tokens: int) -> None:
        first = self.state.next_ticket + 1  # no two prompts begin alike
        self.scheduler.submit(
            NewRequest(request_id, [first, *([1] * (num_prompt_tokens - 1))], max_tokens)
        )
        self.tokens_at[request_id] = []

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Step after step, until that holds or every request has ended."""
        while self.state.requests and not until():
            self.plan()
            self.take_result()

    def plan(self) -> None:
        while (plan := self.scheduler.plan()) is not None:
            step = self.state.in_flight[-1]
            counts, buffer = encode_plan(plan)
            self.trace.append(np.array(counts, np.int32).tobytes() + buffer)
            began = max(self.now, self._running[-1][0].ended if self._running else 0.0)
            seconds = self.speed(step)
            is_decoding = [
                end - count >= request.num_prompt_tokens
                for end, count, request in zip(
                    step.ends.tolist(), step.num_new_tokens.tolist(), step.requests, strict=False
                )
            ]
            taken = Step(
                began, began + seconds, int(step.num_new_tokens.sum()), int(sum(is_decoding))
            )
            self._running.append((taken, _result(step, seconds)))

    def take_result(self) -> None:
        step, result = self._running.popleft()
        self.now = step.ended
        self.steps.append(step)
        for request in self.scheduler.absorb(result).sampled:
            self.tokens_at[request.request_id].append(self.now)

    def longest_gap(self, request_id: str, since: float = 0.0) -> float:
        """Seconds between two tokens of it that came after `since`."""
        times = [moment for moment in self.tokens_at[request_id] if moment >= since]
        return max(np.diff(times))


def _result(step: InFlight, seconds: float) -> StepResult:
    samples, rows = len(step.sampled), len(step.rows)
    return StepResult(
        step_id=step.step_id,
        device_microseconds=round(seconds * 1e6),
        queue_microseconds=0,
        token_ids=np.zeros(samples, np.int32),
        is_finite=np.ones(rows, np.int32),
    )


def limits(target_step_ms: float, depth: int = 2, **changes: int) -> Limits:
    return Limits(
        **{"max_batch_tokens": 2048, "max_requests_per_batch": 64, **changes},
        max_plans_in_flight=depth,
        target_step_ms=target_step_ms,
    )
