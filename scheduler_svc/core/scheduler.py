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

from collections.abc import Callable, Sequence

from protos.plan import StepPlan, StepResult
from scheduler_svc.core.drafting import Drafter
from scheduler_svc.core.limits import NO_MEMORY, Geometry, Limits
from scheduler_svc.core.pack import pack
from scheduler_svc.core.policies import FIFO, STATIC, Policy
from scheduler_svc.core.request import FinishReason, NewRequest, Request, RequestState
from scheduler_svc.core.state import State
from scheduler_svc.core.step.absorb import Absorbed, absorb
from scheduler_svc.core.step.batch import Batch
from scheduler_svc.core.step.fill import fill_by_phase
from scheduler_svc.core.step.launch import launch
from scheduler_svc.core.step.overtaking import make_room
from scheduler_svc.core.step.result_check import why_not_the_result
from scheduler_svc.core.step.shortage import relieve
from scheduler_svc.core.step.static_batches import StaticState, fill_static_batch


def drafts_of(request: Request) -> list[int]:
    """What may follow, by the request's own text (drafting.py)."""
    if request.drafter is None:
        request.drafter = Drafter()
    return request.drafter.draft(
        request.token_ids, request.speculate, request.num_drafted, request.num_accepted
    )


class Scheduler:
    """The only writer of request state; `state` is public for reading."""

    def __init__(
        self,
        limits: Limits,
        geometry: Geometry = NO_MEMORY,
        policy: Policy = FIFO,
        propose: Callable[[Request], Sequence[int]] = drafts_of,
    ) -> None:
        """`propose` guesses what follows in requests that speculate; it is called for each of them
        that got a token, and must depend on nothing else."""
        is_static = policy is STATIC
        self.state = (StaticState if is_static else State)(limits, geometry, policy)
        self._fill = fill_static_batch if is_static else fill_by_phase
        self._propose = propose

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
        absorbed = absorb(self.state, result)
        if self.state.rows.num_speculating:
            for request in absorbed.sampled:
                if request.speculate and request.state is RequestState.DECODING:
                    self._draft(request)
        return absorbed

    def why_invalid(self, result: StepResult, vocab_size: int = 0) -> str | None:
        """How a result contradicts the oldest plan in flight; None if it can be absorbed.
        `vocab_size` bounds the token ids; 0 = unknown."""
        if not self.state.in_flight:
            return f"step {result.step_id} is not in flight"
        return why_not_the_result(self.state.in_flight[0], result, vocab_size)

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

    def _draft(self, request: Request) -> None:
        """Drafts what may follow the known tokens, for the next step to verify if rows, budgets and
        memory are to spare. While samples are outstanding, the row is not planned further ahead if
        it would draft now: most texts that repeat themselves go on doing so."""
        rows, row = self.state.rows, request.row
        outstanding = int(rows.outstanding[row])
        room = request.max_total_tokens - len(request.token_ids) - outstanding - 1
        drafts = tuple(self._propose(request)[: max(0, min(request.speculate, room))])
        rows.awaits_drafts[row] = len(drafts) > 0
        if not outstanding:
            request.drafts = drafts
            rows.num_drafts[row] = len(drafts)
