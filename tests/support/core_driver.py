"""The real scheduler core, driven by hand: submit, plan, absorb."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Final

from protos import link_pb2
from protos.plan import StepPlan, StepResult
from scheduler_svc.core.limits import Limits, why_never_fits
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.core.request import NewRequest, Request, Sampling
from scheduler_svc.core.scheduler import Scheduler, drafts_of
from scheduler_svc.engine.ready_check import geometry_of
from tests.support.without_model import without_model

GREEDY: Final = Sampling(temperature=0)


class CoreDriver:
    """A core over the memory that a worker's Ready describes.

    Free chunks are shuffled, so that tables are scattered and a kernel that reads neighbouring
    blocks instead of its table is found out.
    """

    def __init__(
        self,
        ready: link_pb2.Ready,
        *,
        max_batch_tokens: int,
        max_requests: int,
        policy: str = "fifo",
        depth: int = 1,
        allow_block_sharing: bool = True,
        safety_margin: float | None = None,
        propose: Callable[[Request], Sequence[int]] = drafts_of,
    ) -> None:
        chosen = POLICIES[policy]
        margin = chosen.safety_margin if safety_margin is None else safety_margin
        limits = Limits(max_batch_tokens, max_requests, 0, margin, depth, allow_block_sharing)
        self.scheduler = Scheduler(limits, geometry_of(ready), chosen, propose)
        self.state = self.scheduler.state
        random.Random(0).shuffle(self.state.memory.device.chunks.clean)
        self._names = map("prompt{}".format, count())

    def submit(self, new: NewRequest) -> list[Request]:
        """Returns the request and its siblings; it must fit."""
        geometry = self.state.geometry
        reason = why_never_fits(
            len(new.prompt_token_ids),
            new.max_tokens,
            geometry.max_model_len,
            geometry.pool_tokens(False, new.num_beams, len(new.prompt_token_ids)),
            new.num_beams,
        )
        assert reason is None, reason
        return self.scheduler.submit(new)

    def submit_prompts(
        self, *prompts: Sequence[int], max_tokens: int = 1, sampling: Sampling = GREEDY
    ) -> None:
        for prompt in prompts:
            self.submit(NewRequest(next(self._names), prompt, max_tokens, sampling))

    def limit_tokens(self, max_batch_tokens: int) -> None:
        """From the next plan on."""
        self.state.limits = replace(self.state.limits, max_batch_tokens=max_batch_tokens)

    def plan(self) -> StepPlan | None:
        """The next step; None while plans are outstanding that it must wait for, or when idle."""
        return self.scheduler.plan()

    def absorb(self, result: StepResult) -> None:
        self.scheduler.absorb(result)

    def plans_without_model(self) -> Iterator[StepPlan]:
        """Plans to the end, whose samples are all token 0. With a depth of 2 each but the first is
        made before the samples of the one before are known."""
        outstanding: list[StepPlan] = []
        while self.state.requests:
            while (plan := self.plan()) is not None:
                outstanding.append(plan)
                yield plan
            self.absorb(without_model(outstanding.pop(0)))
