"""Seeded random workloads, and the driver that runs them through the core and a shadow worker."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.absorb import absorb
from scheduler_svc.core.admission import why_never_fits
from scheduler_svc.core.check import check, check_rows
from scheduler_svc.core.commit import commit
from scheduler_svc.core.decide import decide
from scheduler_svc.core.limits import FULL_ATTENTION, Geometry, GroupGeometry, Limits
from scheduler_svc.core.pack import pack
from scheduler_svc.core.request import FinishReason, NewRequest, Request, Sampling
from scheduler_svc.core.state import State
from tests.shadow_worker import ShadowWorker, expected_tokens


@dataclass(frozen=True)
class Setup:
    """The memory and the limits of a run."""

    num_blocks: int = 64
    page_size: int = 4
    max_batch_tokens: int = 64
    max_requests: int = 8
    max_model_len: int = 128
    safety_margin: float = 0.15
    cache_budget: int = 0
    max_plans_in_flight: int = 1
    blocks_per_chunk: int = 1
    vocab_size: int = 50

    def geometry(self) -> Geometry:
        return Geometry(
            page_size=self.page_size,
            num_chunks=2 + self.num_blocks // self.blocks_per_chunk,
            chunk_bytes=64,
            groups=(GroupGeometry(FULL_ATTENTION, 1, self.blocks_per_chunk),),
            max_model_len=self.max_model_len,
        )

    def limits(self) -> Limits:
        return Limits(
            max_batch_tokens=self.max_batch_tokens,
            max_requests_per_batch=self.max_requests,
            cache_budget=self.cache_budget,
            safety_margin=self.safety_margin,
            max_plans_in_flight=self.max_plans_in_flight,
        )


@dataclass
class Outcome:
    """What a run did."""

    steps: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    soft_resets: int = 0
    chunked_prefills: int = 0
    mixed_steps: int = 0
    most_running: int = 0
    trace: list[bytes] = field(default_factory=list)


class Simulation:
    """The core and a shadow worker, with the plans in flight between them."""

    def __init__(self, setup: Setup, seed: int = 0, keep_trace: bool = False) -> None:
        self.setup = setup
        self.rng = np.random.default_rng(seed)
        self.state = State(setup.limits(), setup.geometry())
        # a shuffled pool, so that a stale read cannot pass by luck
        self.rng.shuffle(self.state.pool.free)
        self.worker = ShadowWorker(setup.geometry(), setup.max_requests, setup.vocab_size)
        self.pristine = [
            kv[: setup.page_size * setup.blocks_per_chunk].copy() for kv in self.worker.kv
        ]
        self.results: deque = deque()
        self.outcome = Outcome()
        self.keep_trace = keep_trace

    def submit(self, new: NewRequest) -> Request | None:
        if why_never_fits(self.state.geometry, len(new.prompt_token_ids), new.max_tokens):
            self.outcome.refused.append(new.request_id)
            return None
        self.outcome.tokens[new.request_id] = []
        return self.state.submit(new)

    def abort(self, request_id: str) -> None:
        request = self.state.requests.get(request_id)
        if request is not None:
            self.state.finish(request, FinishReason.ABORT)
            self._ended(request)

    def plan(self) -> bool:
        """Plans and sends one step if one may be in flight and there is something to do."""
        if len(self.state.in_flight) >= self.setup.max_plans_in_flight:
            return False
        decision = decide(self.state)
        step = commit(self.state, decision)
        self.outcome.soft_resets += len(decision.soft_resets)
        if step is None:
            return not decision.is_empty
        plan = pack(self.state, step)
        assert plan.query_start_loc[-1] <= self.setup.max_batch_tokens
        assert len(step.rows) <= self.setup.max_requests
        if self.keep_trace:
            from protos.plan import encode_plan

            counts, buffer = encode_plan(plan)
            self.outcome.trace.append(np.array(counts, np.int32).tobytes() + buffer)
        is_prefill = step.num_new_tokens > 1
        self.outcome.mixed_steps += bool(is_prefill.any() and not is_prefill.all())
        self.outcome.chunked_prefills += len(step.rows) - len(step.sampled)
        self.outcome.most_running = max(self.outcome.most_running, len(step.rows))
        self.outcome.steps += 1
        self.results.append(self.worker.step(plan))
        check_rows(self.state, step.rows)
        if self.outcome.steps % 100 == 0:
            check(self.state)
        return True

    def absorb(self) -> None:
        absorbed = absorb(self.state, self.results.popleft())
        for request, token_id in absorbed.tokens:
            self.outcome.tokens[request.request_id].append(token_id)
            if request.finish_reason is not None:
                self._ended(request)

    def turn(self) -> bool:
        """Plans what it may, then takes one result; False when there was nothing to do."""
        progressed = False
        while self.plan():
            progressed = True
        if self.results:
            self.absorb()
            return True
        return progressed

    def run(self) -> Outcome:
        """Turns until every request has ended; a wedge is an error."""
        while self.state.requests or self.results:
            assert self.turn(), f"wedged with {len(self.state.requests)} live requests"
        check(self.state)
        assert self.state.pool.num_free == self.state.pool.num_usable, "blocks leaked"
        assert not self.state.rows.running
        self.worker.check_reserved(self.pristine)
        return self.outcome

    def _ended(self, request: Request) -> None:
        assert request.request_id not in self.outcome.reasons, "ended twice"
        assert request.finish_reason is not None
        self.outcome.reasons[request.request_id] = request.finish_reason


def random_requests(
    rng: np.random.Generator,
    count: int,
    *,
    prompt: tuple[int, int] = (1, 32),
    output: tuple[int, int] = (1, 32),
    vocab_size: int = 50,
    stop_share: float = 0.3,
    sampled_share: float = 0.3,
) -> list[NewRequest]:
    """Requests with uniform lengths in the given ranges (both ends included)."""
    requests = []
    for i in range(count):
        stops = frozenset(
            rng.integers(0, vocab_size, 2).tolist() if rng.random() < stop_share else []
        )
        requests.append(
            NewRequest(
                request_id=f"r{i}",
                prompt_token_ids=rng.integers(
                    0, vocab_size, rng.integers(prompt[0], prompt[1] + 1)
                ).tolist(),
                max_tokens=int(rng.integers(output[0], output[1] + 1)),
                sampling=Sampling(
                    temperature=1.0 if rng.random() < sampled_share else 0.0,
                    seed=int(rng.integers(0, 2**63)),
                    stop_token_ids=stops,
                ),
            )
        )
    return requests


def expected(requests: list[NewRequest], vocab_size: int) -> dict[str, list[int]]:
    """The tokens that each request must produce."""
    outputs = expected_tokens(
        [new.prompt_token_ids for new in requests],
        [new.max_tokens for new in requests],
        vocab_size,
        [new.sampling.temperature for new in requests],
        [new.sampling.seed for new in requests],
        [new.sampling.stop_token_ids for new in requests],
    )
    return {new.request_id: tokens for new, tokens in zip(requests, outputs, strict=True)}


def run_workload(
    setup: Setup,
    requests: list[NewRequest],
    *,
    seed: int = 0,
    arrivals_per_turn: float = 2.0,
    abort_share: float = 0.0,
    keep_trace: bool = False,
) -> Outcome:
    """Feeds the requests in at random turns, aborts some, and checks every token of all."""
    simulation = Simulation(setup, seed, keep_trace)
    rng = simulation.rng
    waiting = deque(requests)
    doomed: list[str] = []
    while waiting or simulation.state.requests or simulation.results:
        for _ in range(min(len(waiting), int(rng.poisson(arrivals_per_turn)))):
            new = waiting.popleft()
            if simulation.submit(new) and rng.random() < abort_share:
                doomed.append(new.request_id)
        if doomed and rng.random() < 0.3:
            simulation.abort(doomed.pop(int(rng.integers(len(doomed)))))
        progressed = simulation.turn()
        assert progressed or waiting or not simulation.state.requests, "wedged"
    outcome = simulation.run()
    verify(requests, outcome, setup.vocab_size)
    return outcome


def verify(requests: list[NewRequest], outcome: Outcome, vocab_size: int) -> None:
    """Every accepted request ended once; its tokens are right, or right until its abort."""
    accepted = [new for new in requests if new.request_id not in outcome.refused]
    want = expected(accepted, vocab_size) if accepted else {}
    assert outcome.reasons.keys() == want.keys()
    for new in accepted:
        got, right = outcome.tokens[new.request_id], want[new.request_id]
        reason = outcome.reasons[new.request_id]
        if reason is FinishReason.ABORT:
            assert got == right[: len(got)], new.request_id
        else:
            assert got == right, new.request_id
            stopped = right[-1] in new.sampling.stop_token_ids
            assert reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
