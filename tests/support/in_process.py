"""The scheduler core and a real worker's runner in one process, with nothing between them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.core.absorb import absorb
from scheduler_svc.core.admission import why_never_fits
from scheduler_svc.core.check import check
from scheduler_svc.core.commit import commit
from scheduler_svc.core.decide import decide
from scheduler_svc.core.limits import Geometry, GroupGeometry, Limits
from scheduler_svc.core.pack import pack
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.core.request import NewRequest
from scheduler_svc.core.state import State
from scheduler_svc.core.views import get_cache
from tests.support.loading import configure
from worker.model.load import LoadedModel
from worker.runner import Launched, Runner


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
        self.runner = Runner(
            loaded, told, chunks + 2, num_swap_chunks=swap_chunks, is_padded=is_padded
        )
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
        self.state = State(limits, geometry, order)
        self.launched: deque[Launched] = deque()

    def serve(self, requests: list[NewRequest]) -> Served:
        """All at once, to the end. Rows and blocks are all free after that."""
        state, served = self.state, Served()
        for new in requests:
            reason = why_never_fits(state.geometry, len(new.prompt_token_ids), new.max_tokens)
            assert reason is None, reason
            for request in state.submit(new):
                served.tokens[request.request_id, request.index] = request.token_ids
        prompts = {new.request_id: len(new.prompt_token_ids) for new in requests}
        before = (
            state.counters.offloads,
            state.counters.restores,
            state.counters.soft_resets,
            state.prefix_cache.num_hit,
        )
        while state.requests or self.launched:
            self._turn(served)
        check(state)
        assert state.pool.num_free == state.pool.num_usable
        served.tokens = {who: t[prompts[who[0]] :] for who, t in served.tokens.items()}
        after = (
            state.counters.offloads,
            state.counters.restores,
            state.counters.soft_resets,
            state.prefix_cache.num_hit,
        )
        served.offloads, served.restores, served.soft_resets, served.cached_tokens = (
            now - then for now, then in zip(after, before, strict=True)
        )
        return served

    def _turn(self, served: Served) -> None:
        state = self.state
        while len(state.in_flight) < state.limits.max_plans_in_flight:
            decision = decide(state)
            step = commit(state, decision)
            if step is not None:
                served.steps += 1
                served.tail_copies += len(step.transfers.copy)
                served.utilisation.append(get_cache(state).utilisation)
                self.launched.append(self.runner.launch(pack(state, step)))
            elif decision.is_empty:
                assert self.launched, "wedged"
                break
        if self.launched:
            absorb(state, self.launched.popleft().wait())
