"""The scheduler: `plan` brings the state forward to the next step, `absorb` takes in its result.

One rule instead of phases: a step schedules `num_tokens - num_computed_tokens` tokens of a
request, cut by the budgets, where num_tokens counts the samples still outstanding. Prefill,
chunked prefill, decode, a prefix hit, resuming after a preemption, verifying guessed tokens are
the same case; only the order of the candidates differs (policies.py).

Three budgets bound a step: tokens, requests and pages read; and its prompts are cut so that it
takes about the time that it aims at (step_time.py). Memory is taken as rows are added, all or
nothing over the cache groups (memory/).

The same calls in the same order give byte-identical plans: time and randomness are arguments.
"""

from __future__ import annotations

from protos.plan import StepPlan, StepResult
from scheduler_svc.core.limits import NO_MEMORY, Geometry, Limits
from scheduler_svc.core.pack import pack
from scheduler_svc.core.policies import FIFO, STATIC, Policy
from scheduler_svc.core.request import NO_ROW, FinishReason, NewRequest, Request
from scheduler_svc.core.state import State
from scheduler_svc.core.step.absorb import Absorbed, absorb, why_not_the_result
from scheduler_svc.core.step.batch import Batch
from scheduler_svc.core.step.fill import fill_by_phase
from scheduler_svc.core.step.launch import launch
from scheduler_svc.core.step.shortage import relieve
from scheduler_svc.core.step.static_batches import StaticState, fill_static_batch


class Scheduler:
    """Owns every fact about every request; whoever runs it calls these methods only.

    `state` is there to be read.
    """

    def __init__(
        self, limits: Limits, geometry: Geometry = NO_MEMORY, policy: Policy = FIFO
    ) -> None:
        is_static = policy is STATIC
        self.state = (StaticState if is_static else State)(limits, geometry, policy)
        self._fill = fill_static_batch if is_static else fill_by_phase

    def submit(self, new: NewRequest) -> list[Request]:
        """Accepts a request; returns it and its siblings. The caller has checked that it can ever
        fit (limits.py), and that no live request has its id."""
        return self.state.submit(new)

    def finish(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a live request, in whatever state it is; siblings not forked off end with it."""
        self.state.finish(request, reason)

    def plan(self) -> StepPlan | None:
        """The next step, which is in flight from now on; None when nothing can be computed, or when
        as many plans as may be are without a result."""
        state = self.state
        while len(state.in_flight) < state.plans_allowed:
            for cell in state.suspects.turns():
                batch = Batch(state, cell)
                self._fill(batch)  # rows in the policy's order, each with its blocks
                relieve(batch)  # for rows that found none: preempt the fewest, try once more
                if batch.parts or batch.victims:
                    break
            step = launch(batch)
            if step is not None:
                return pack(state, step)
            if not (state.recall_offloads() or batch.victims):
                break
        return None

    def absorb(self, result: StepResult) -> Absorbed:
        """Takes in the result of the oldest plan in flight; results come in the order of plans."""
        return absorb(self.state, result)

    def why_invalid(self, result: StepResult, vocab_size: int = 0) -> str | None:
        """What contradicts the oldest plan in flight in a result; None if it can be absorbed.
        `vocab_size` bounds the token ids; 0 = not known."""
        if not self.state.in_flight:
            return f"step {result.step_id} is not in flight"
        return why_not_the_result(self.state.in_flight[0], result, vocab_size)

    def draft(self, request: Request, token_ids: list[int]) -> None:
        """Guesses the tokens that follow a speculating request's known ones: the next step verifies
        as many of them as it may sample."""
        state, room = self.state, request.max_total_tokens - len(request.token_ids) - 1
        request.drafts = tuple(token_ids[: max(0, min(request.speculate, room))])
        if request.row != NO_ROW:
            state.rows.num_drafts[request.row] = len(request.drafts)

    def flush_cache(self) -> int:
        """Forgets the names of all blocks, so that nothing is found again; how many had one.
        Requests keep the blocks that they have, shared ones too."""
        return self.state.memory.flush()

    def lose_worker(self, geometry: Geometry = NO_MEMORY, first_step_id: int = 0) -> None:
        """All KV is gone: every running request waits again, plans in flight are forgotten.

        `geometry` is the memory of the worker that comes next, `first_step_id` what its steps are
        counted from. Requests keep every token that has come back; what was sampled but never
        returned is sampled again, to the same end.
        """
        self.state.lose_worker(geometry, first_step_id)
