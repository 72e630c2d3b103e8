"""The scheduler core and a real worker's runner in one process, with nothing between them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.core.limits import Geometry, GroupGeometry, Limits, why_never_fits
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.core.request import NewRequest
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine.views import get_cache
from tests.support.check import check
from tests.support.runners import pad_steps
from tests.worker.conftest import configure
from worker.model.load import LoadedModel
from worker.runner import Runner, RunningStep


@dataclass
class Served:
    """What came of a run."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    steps: int = 0
    cached_tokens: int = 0
    offloads: int = 0
    restores: int = 0
    soft_resets: int = 0
    tail_copies: int = 0
    utilisation: list[float] = field(default_factory=list)  # after each step


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
        **settings: Any,
    ) -> None:
        told = configure(
            max_batch_tokens=max_batch_tokens,
            max_requests_per_batch=max_requests,
            page_size=loaded.geometry.page_size,
            **settings,
        )
        self.runner = Runner(loaded, told, chunks + 2, swap_chunks)
        if is_padded:
            pad_steps(self.runner)
        ready = self.runner.ready()
        geometry = Geometry(
            page_size=ready.page_size,
            num_chunks=ready.num_chunks,
            chunk_bytes=ready.chunk_bytes,
            groups=tuple(
                GroupGeometry(g.kind, len(g.layers), g.blocks_per_chunk, g.sliding_window)
                for g in ready.groups
            ),
            max_model_len=ready.max_model_len,
            num_swap_chunks=ready.num_swap_chunks,
        )
        order = POLICIES[policy]
        margin = order.safety_margin if safety_margin is None else safety_margin
        limits = Limits(max_batch_tokens, max_requests, 0, margin, depth, allow_block_sharing)
        self.scheduler = Scheduler(limits, geometry, order)
        self.state = self.scheduler.state
        self.launched: deque[RunningStep] = deque()

    def serve(self, requests: list[NewRequest]) -> Served:
        """All at once, to the end. Rows and blocks are all free after that."""
        state, served = self.state, Served()
        for new in requests:
            reason = why_never_fits(
                len(new.prompt_token_ids),
                new.max_tokens,
                state.geometry.max_model_len,
                state.geometry.pool_tokens(),
            )
            assert reason is None, reason
            for request in self.scheduler.submit(new):
                served.tokens[request.request_id, request.index] = request.token_ids
        prompts = {new.request_id: len(new.prompt_token_ids) for new in requests}
        before = (
            state.counters.offloads,
            state.counters.restores,
            state.counters.soft_resets,
            state.memory.prefix_cache.num_hit,
        )
        while state.requests or self.launched:
            self._turn(served)
        check(state)
        assert state.memory.device.is_free
        served.tokens = {who: t[prompts[who[0]] :] for who, t in served.tokens.items()}
        after = (
            state.counters.offloads,
            state.counters.restores,
            state.counters.soft_resets,
            state.memory.prefix_cache.num_hit,
        )
        served.offloads, served.restores, served.soft_resets, served.cached_tokens = (
            now - then for now, then in zip(after, before, strict=True)
        )
        return served

    def _turn(self, served: Served) -> None:
        while (plan := self.scheduler.plan()) is not None:
            step = self.state.in_flight[-1]
            served.steps += 1
            served.tail_copies += len(step.transfers.copy)
            served.utilisation.append(get_cache(self.state).utilisation)
            self.launched.append(self.runner.launch(plan))
        assert self.launched, "wedged"
        self.scheduler.absorb(self.launched.popleft().wait())
