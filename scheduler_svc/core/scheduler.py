"""The scheduler: `plan` advances the state to the next step, `absorb` applies a step's result.

One rule instead of phases: a step schedules `num_tokens - num_computed_tokens` tokens of a
request, cut by the budgets, where num_tokens counts outstanding samples. Prefill, chunked prefill,
decode, prefix hits, resumption after a preemption and verification of drafts are the same case;
only the order of the candidates differs (policies.py).

Three budgets bound a step: tokens, requests and pages read; prompts are also cut to meet its target
time (step_time.py). Each row takes its blocks when it is added, all or nothing over the cache
groups (memory/). The same calls in the same order give byte-identical plans: time and randomness
are arguments.
"""

from __future__ import annotations

from protos.plan import StepPlan, StepResult
from scheduler_svc.core.limits import NO_MEMORY, Geometry, Limits
from scheduler_svc.core.pack import pack
from scheduler_svc.core.policies import FIFO, STATIC, Policy
from scheduler_svc.core.request import NO_ROW, FinishReason, NewRequest, Request
from scheduler_svc.core.state import State
from scheduler_svc.core.step.absorb import Absorbed, absorb
from scheduler_svc.core.step.batch import Batch
from scheduler_svc.core.step.fill import fill_by_phase
from scheduler_svc.core.step.launch import launch
from scheduler_svc.core.step.overtaking import make_room
from scheduler_svc.core.step.result_check import why_not_the_result
from scheduler_svc.core.step.shortage import relieve
from scheduler_svc.core.step.static_batches import StaticState, fill_static_batch


class Scheduler:
    """The only writer of request state; `state` is public for reading."""

    def __init__(
        self, limits: Limits, geometry: Geometry = NO_MEMORY, policy: Policy = FIFO
    ) -> None:
        is_static = policy is STATIC
        self.state = (StaticState if is_static else State)(limits, geometry, policy)
        self._fill = fill_static_batch if is_static else fill_by_phase

    def submit(self, new: NewRequest) -> list[Request]:
        """Queues a request; returns it and its siblings. The caller has checked that it fits an
        empty pool (limits.py) and that its id is not live. A resumed answer that was complete is
        FINISHED at once, with its finish_reason: no `Absorbed` will list it."""
        return self.state.submit(new)

    def finish(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a live request in any state; siblings not yet forked end with it."""
        self.state.finish(request, reason)

    def plan(self) -> StepPlan | None:
        """The next step, in flight from now on; None when there is nothing to compute or the limit
        of plans in flight is reached."""
        state = self.state
        if not state.memory.groups:
            return None  # no worker
        while len(state.in_flight) < state.plans_allowed:
            for cell in state.suspects.turns():
                batch = Batch(state, cell)
                make_room(batch)  # preempts for more urgent requests, if the policy asks for it
                self._fill(batch)  # decoding, prefilling, pending rows in the policy's order
                relieve(batch)  # preempts the fewest victims for stalled rows; these try once more
                if not batch.is_empty or batch.victims:
                    break
            step = launch(batch)
            if step is not None:
                return pack(state, step)
            if not (state.recall_offloads() or batch.victims):
                break
        return None

    def absorb(self, result: StepResult) -> Absorbed:
        """Applies the result of the oldest plan in flight; results arrive in plan order."""
        return absorb(self.state, result)

    def why_invalid(self, result: StepResult, vocab_size: int = 0) -> str | None:
        """How a result contradicts the oldest plan in flight; None if it can be absorbed.
        `vocab_size` bounds the token ids; 0 = unknown."""
        if not self.state.in_flight:
            return f"step {result.step_id} is not in flight"
        return why_not_the_result(self.state.in_flight[0], result, vocab_size)

    def draft(self, request: Request, token_ids: list[int]) -> None:
        """Proposes tokens of the model's vocabulary to follow the known ones of a speculating
        request, cut to its `speculate` and to the samples it has left. The next step verifies them
        if rows, budgets and memory are to spare. Ignored unless the request decodes and all of its
        samples have returned."""
        rows, room = self.state.rows, request.max_total_tokens - len(request.token_ids) - 1
        row = request.row
        if row != NO_ROW and rows.is_decoding[row] and not rows.outstanding[row]:
            request.drafts = tuple(token_ids[: max(0, min(request.speculate, room))])
            rows.num_drafts[row] = len(request.drafts)

    def flush_cache(self) -> int:
        """Empties the prefix cache; returns the number of named blocks. Requests keep their blocks,
        shared ones included."""
        return self.state.memory.flush()

    def lose_worker(self, geometry: Geometry = NO_MEMORY, first_step_id: int = 0) -> None:
        """Drops all KV and the plans in flight; running requests are pending again.

        `geometry` is the next worker's memory, `first_step_id` its first step. Requests keep the
        tokens already returned; lost samples are drawn again with the same uniform numbers.
        """
        self.state.lose_worker(geometry, first_step_id)
