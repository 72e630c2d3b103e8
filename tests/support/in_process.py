"""The scheduler core and a real worker's runner in one process, with nothing between them."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from protos.plan import StepPlan, StepResult
from scheduler_svc.core.request import NewRequest, Request, Sampling
from scheduler_svc.core.scheduler import drafts_of
from scheduler_svc.engine.ready_check import geometry_of
from scheduler_svc.engine.views import get_cache
from tests.support.check import check
from tests.support.core_driver import CoreDriver
from tests.support.loading import configure
from tests.support.runners import pad_steps
from worker.model.load import LoadedModel
from worker.runner import Runner, RunningStep
from worker.step import sampler
from worker.step.sampler import SampleRows

Sample = Callable[[torch.Tensor, SampleRows], torch.Tensor]
Answerer = tuple[str, int]  # request_id and sibling index
_Logits = dict[Answerer, dict[int, torch.Tensor]]  # [V] by the position of the sampled token


@dataclass
class Served:
    """What came of a run."""

    tokens: dict[Answerer, list[int]] = field(default_factory=dict)
    requests: dict[Answerer, Request] = field(default_factory=dict)  # as they ended
    # [tokens, V] that they were sampled from
    logits: dict[Answerer, torch.Tensor] = field(default_factory=dict)
    steps: int = 0
    cached_tokens: int = 0
    offloads: int = 0
    restores: int = 0
    soft_resets: int = 0
    tail_copies: int = 0
    utilisation: list[float] = field(default_factory=list)  # after each step


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    logits: torch.Tensor  # [tokens, V] that they were sampled from


class InProcess:
    """A model with its memory; `serve` may be called again, and finds what was cached."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        chunks: int = 400,
        swap_chunks: int = 0,
        max_batch_tokens: int = 40,
        max_requests: int = 8,
        policy: str = "fifo",
        depth: int = 1,
        allow_block_sharing: bool = True,
        safety_margin: float | None = None,
        is_padded: bool = False,
        propose: Callable[[Request], Sequence[int]] = drafts_of,
        **settings: Any,
    ) -> None:
        configured = {**settings, "page_size": loaded.geometry.page_size}
        told = configure(
            max_batch_tokens=max_batch_tokens, max_requests_per_batch=max_requests, **configured
        )
        self.loaded = loaded
        self._is_padded = is_padded
        self._new_runner = lambda: Runner(loaded, told, chunks + 2, swap_chunks)
        self._choose: Sample = sampler.sample
        self._start_worker()
        self.core = CoreDriver(
            self.runner.ready(),
            max_batch_tokens=max_batch_tokens,
            max_requests=max_requests,
            policy=policy,
            depth=depth,
            allow_block_sharing=allow_block_sharing,
            safety_margin=safety_margin,
            propose=propose,
        )
        self.state = self.core.state
        self.launched: deque[RunningStep] = deque()
        self.logits: list[torch.Tensor] = []  # [S, V] of every step that sampled

    def _start_worker(self) -> None:
        self.runner = self._new_runner()
        self.runner.sample = self._sample
        if self._is_padded:
            pad_steps(self.runner)

    def lose_worker(self) -> None:
        """It dies with all its memory, and with what it had not answered; another one comes."""
        self.launched.clear()
        self._start_worker()
        self.core.scheduler.lose_worker(geometry_of(self.runner.ready()))

    def sample_with(self, choose: Sample) -> None:
        """From now on `choose` takes the sampler's place; logits are kept all the same."""
        self._choose = choose

    def _sample(self, logits: torch.Tensor, samples: SampleRows) -> torch.Tensor:
        self.logits.append(logits.clone())
        return self._choose(logits, samples)

    def step(self, plan: StepPlan) -> StepResult:
        """Runs a plan, whether the core made it or not, and waits for its result."""
        return self.runner.launch(plan).wait()

    def next_step(self) -> tuple[StepPlan, StepResult]:
        """Plans, runs and absorbs one step."""
        plan = self.core.plan()
        assert plan is not None, "nothing to plan"
        result = self.step(plan)
        self.core.absorb(result)
        return plan, result

    def first_plan(self, *prompts: Sequence[int], max_tokens: int = 1) -> StepPlan:
        """The next plan, after greedy requests with these prompts were submitted."""
        self.core.submit_prompts(*prompts, max_tokens=max_tokens)
        plan = self.core.plan()
        assert plan is not None, "nothing to plan"
        return plan

    def answers(
        self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], stagger: int = 0
    ) -> list[Answer]:
        """Greedy answers; request i arrives at turn i * stagger."""
        requests = [
            NewRequest(f"r{i}", prompt, count, Sampling(0))
            for i, (prompt, count) in enumerate(zip(prompts, max_tokens, strict=True))
        ]
        served = self.serve(requests, stagger)
        return [Answer(served.tokens[who], served.logits[who]) for who in served.tokens]

    def serve(
        self, requests: list[NewRequest], stagger: int = 0, deaths: Collection[int] = ()
    ) -> Served:
        """All of them to the end; request i arrives at turn i * stagger, and a worker dies at each
        turn of `deaths`. Rows and blocks are all free after that."""
        state, served = self.state, Served()
        logits: _Logits = defaultdict(dict)
        waiting = deque(enumerate(requests))
        counted = self._counters()
        for turn in itertools.count():
            while waiting and turn >= stagger * waiting[0][0]:
                for request in self.core.submit(waiting.popleft()[1]):
                    served.requests[request.request_id, request.index] = request
                    served.tokens[request.request_id, request.index] = request.token_ids
            if turn in deaths:
                self.lose_worker()
            if not (waiting or state.requests or self.launched):
                break
            self._turn(served, logits)
        check(state)
        assert state.memory.device.is_free
        prompts = {new.request_id: len(new.prompt_token_ids) for new in requests}
        for who, token_ids in served.tokens.items():
            start = prompts[who[0]]
            served.tokens[who] = token_ids[start:]
            positions = range(start, len(token_ids))
            if positions:
                served.logits[who] = torch.stack([logits[who][at] for at in positions])
        served.offloads, served.restores, served.soft_resets, served.cached_tokens = (
            now - then for now, then in zip(self._counters(), counted, strict=True)
        )
        return served

    def _counters(self) -> tuple[int, int, int, int]:
        counters, hits = self.state.counters, self.state.memory.prefix_cache.num_hit
        return counters.offloads, counters.restores, counters.soft_resets, hits

    def _turn(self, served: Served, logits: _Logits) -> None:
        while (plan := self.core.plan()) is not None:
            served.steps += 1
            served.tail_copies += len(plan.copy)
            served.utilisation.append(get_cache(self.state).utilisation)
            num_sampled = len(self.logits)
            self.launched.append(self.runner.launch(plan))
            if len(self.logits) > num_sampled:
                self._note_logits(plan, torch.cat(self.logits[num_sampled:]), logits)
        if self.launched:
            self.core.absorb(self.launched.popleft().wait())
        else:
            assert not self.state.requests, "wedged"

    def _note_logits(self, plan: StepPlan, sampled: torch.Tensor, logits: _Logits) -> None:
        """Notes sampled [S, V] by the position of each sample; those of rejected draft tokens are
        overwritten later."""
        indices = plan.logits_indices[plan.sample_logits]
        places = np.searchsorted(plan.query_start_loc, indices, side="right") - 1
        positions = plan.seq_lens[places] - plan.query_start_loc[places + 1] + indices + 1
        for row, position, of in zip(plan.sample_rows, positions, sampled, strict=True):
            request = self.state.rows.running[int(row)]
            logits[request.request_id, request.index][int(position)] = of
