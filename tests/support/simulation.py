"""Seeded random workloads, and the driver that runs them through the core and a shadow worker."""

from __future__ import annotations

import copy
from collections import Counter, deque
from dataclasses import dataclass, replace

import numpy as np

from protos.plan import StepPlan, StepResult, encode_plan
from scheduler_svc.core.limits import (
    why_never_fits,
)
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.core.request import FinishReason, NewRequest, Request, RequestState
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import InFlight, State
from tests.support.check import check, check_rows
from tests.support.expected_answers import Expected, expected_answers
from tests.support.expected_beams import expected_beams
from tests.support.shadow_model import Mask, allowed_after
from tests.support.shadow_worker import ShadowWorker
from tests.support.simulated_run import Key, Outcome, Setup


def key(request: Request) -> Key:
    return request.request_id, request.index


@dataclass(frozen=True)
class Peek:
    """A step that was tried on a copy of the scheduler."""

    plan: StepPlan | None
    step: InFlight | None
    soft_resets: list[str]  # request ids
    offloads: list[str]

    @property
    def admitted(self) -> list[str]:
        return [] if self.step is None else [r.request_id for r in self.step.admitted]

    @property
    def tokens(self) -> dict[str, int]:
        """request id → tokens, in batch order."""
        if self.step is None:
            return {}
        counts = self.step.num_new_tokens.tolist()
        pairs = zip(self.step.requests, counts, strict=False)
        return {request.request_id: count for request, count in pairs}


class Simulation:
    """The core and a shadow worker, with the plans in flight between them."""

    def __init__(self, setup: Setup, seed: int = 0, keep_trace: bool = False) -> None:
        self.setup = setup
        self.rng = np.random.default_rng(seed)
        self.scheduler = Scheduler(
            setup.limits(),
            setup.geometry(),
            POLICIES[setup.policy],
            lambda request: self._guess(request),
        )
        # of the plans in flight; None for one that awaits masks which nobody knows yet
        self.results: deque[StepResult | None] = deque()
        self._held: StepPlan | None = None
        self.outcome = Outcome()
        self.keep_trace = keep_trace
        self._answers: dict[Key, list[int]] = {}  # of requests that speculate
        self._connect(garbage_seed=0)

    @property
    def state(self) -> State:
        return self.scheduler.state

    def _connect(self, garbage_seed: int) -> None:
        """A fresh worker."""
        setup = self.setup
        self._shuffle()
        self.worker = ShadowWorker(
            setup.geometry(), setup.max_requests, setup.vocab_size, garbage_seed
        )
        self.worker.most_tokens = setup.max_batch_tokens * setup.max_plans_in_flight
        self.pristine = [
            kv[: setup.page_size * blocks].copy()
            for kv, (_, blocks) in zip(self.worker.kv, setup.groups, strict=True)
        ]

    def _shuffle(self) -> None:
        """A shuffled pool, so that a stale read cannot pass by luck."""
        self.rng.shuffle(self.state.memory.device.chunks.clean)
        self.rng.shuffle(self.state.memory.swap.chunks.clean)

    def lose_worker(self) -> None:
        """It dies with all its memory, and what it had not answered; another one comes."""
        self._forget_results()
        self.scheduler.lose_worker(self.setup.geometry())
        self.outcome.lost_workers += 1
        self._connect(garbage_seed=self.outcome.lost_workers)

    def fail_step(self) -> None:
        """The worker reports a fault: what it had not answered is given up, and all its KV."""
        self._forget_results()
        self.worker.late_copies.clear()
        self.worker.last_step = self.state.next_step_id - 1
        self.scheduler.lose_worker(self.setup.geometry(), self.state.next_step_id)
        self._shuffle()

    def _forget_results(self) -> None:
        self.results.clear()
        self._held = None

    def submit(self, new: NewRequest) -> Request | None:
        geometry = self.state.geometry
        prompt_tokens, width = len(new.prompt_token_ids), new.beams.width if new.beams else 1
        pool_tokens = geometry.pool_tokens(self.state.holds_ended, width, prompt_tokens)
        if width > self.setup.max_requests or why_never_fits(
            prompt_tokens, new.max_tokens, geometry.max_model_len, pool_tokens, width
        ):
            self.outcome.refused.append(new.request_id)
            return None
        family = self.scheduler.submit(new)
        for request in family:
            self._note(request)
        if family[0].finish_reason is not None:
            self._ended(family[0])
        return family[0]

    def abort(self, request_id: str) -> None:
        """As a client does it: with all siblings."""
        for request in list(self.state.requests.get(request_id, [])):
            if request.finish_reason is None:  # a sibling may have ended with the first
                self.scheduler.finish(request, FinishReason.ABORT)
            group = request.beams
            if group is None:
                self._ended(request)
            elif request.index < group.search.settings.num_answers:
                self._note(request)
                self._ended(request)

    def plan(self) -> bool:
        """Plans and sends one step if one may be in flight and there is something to do."""
        plan = self.scheduler.plan()
        self.outcome.counters = self.state.counters
        if plan is None:
            return False
        step = self.state.in_flight[-1]
        assert plan.query_start_loc[-1] <= self.setup.max_batch_tokens
        assert len(step.rows) <= self.setup.max_requests
        if not self.state.holds_ended:
            # a last token is never computed: whoever must end by length is not planned again
            limits = [request.max_total_tokens for request in step.requests[: len(step.rows)]]
            may_sample = plan.seq_lens < limits
            is_scored = np.array([r.max_total_tokens == r.num_prompt_tokens for r in step.requests])
            is_scored = is_scored[: len(step.rows)]
            assert (may_sample | is_scored).all(), "planned past the end by length"
        self.outcome.forks += len(step.named) - len(step.rows)
        self.outcome.tail_copies += len(step.transfers.copy)
        if self.keep_trace:
            counts, buffer = encode_plan(plan)
            self.outcome.trace.append(np.array(counts, np.int32).tobytes() + buffer)
        is_prefill = step.num_new_tokens > 1
        self.outcome.mixed_steps += bool(is_prefill.any() and not is_prefill.all())
        self.outcome.chunked_prefills += len(step.rows) - len(set(step.sampled.tolist()))
        self.outcome.verified += sum(map(len, step.drafts.values()))
        self.outcome.most_running = max(self.outcome.most_running, len(step.rows))
        self.outcome.steps += 1
        self._count(plan, step)
        if plan.awaits_mask and len(self.state.in_flight) > 1:
            self._held = plan  # until the result before it is known
            self.results.append(None)
        else:
            self.results.append(self._compute(plan, step))
        check_rows(self.state, step.rows)
        if self.outcome.steps % 100 == 0:
            check(self.state)
        return True

    def _count(self, plan: StepPlan, step: InFlight) -> None:
        """What the plan asks for, and whether it asks for the right things."""
        outcome, setup = self.outcome, self.setup
        requests = [step.requests[place] for place in step.sampled_for.tolist()]
        assert plan.awaits_mask == any(request.is_constrained for request in requests)
        if setup.max_logits:
            assert len(plan.logits_indices) <= setup.max_logits, "more logits than there are"
            assert len(plan.sample_rows) <= max(setup.max_logits, setup.max_requests)
        outcome.masks += plan.awaits_mask
        outcome.late_masks += plan.awaits_mask and len(self.state.in_flight) > 1
        outcome.histories += int((np.diff(plan.history_start) > 0).sum())
        outcome.bans += int(np.isneginf(plan.bias).sum())
        outcome.scored += len(plan.score_tokens)

    def _compute(self, plan: StepPlan, step: InFlight) -> StepResult:
        if plan.awaits_mask:
            result = self.worker.step(plan, self._masks(step))
        else:
            result = self.worker.step(plan)
        if self.setup.target_step_ms:
            longest = round(4000 * self.setup.target_step_ms)
            result = replace(result, device_microseconds=int(self.rng.integers(longest)))
        return result

    def _masks(self, step: InFlight) -> dict[int, Mask]:
        """As the engine makes them, once all steps before have returned. A request that lost its
        place in the step meanwhile has none."""
        masks = {}
        for sample, request, position, drafts in step.constrained_samples():
            known = [*request.token_ids, *drafts]
            if len(known) == position and request.finish_reason is None:
                output = known[request.num_prompt_tokens :]
                masks[sample] = allowed_after(output, self.setup.vocab_size)
        return masks

    def absorb(self) -> None:
        result = self.results.popleft()
        assert result is not None
        self.worker.finish(result.step_id)
        oldest = self.state.in_flight[0]
        num_known = {r: len(r.token_ids) for r in oldest.requests}
        assert self.scheduler.why_invalid(result, self.setup.vocab_size) is None
        absorbed = self.scheduler.absorb(result)
        for request in absorbed.sampled + absorbed.scored + absorbed.ended:
            self._note(request)
        for request in oldest.requests:  # ended ones, too
            if request.beams is not None:
                continue  # its scores come with the answers
            num_new = len(request.token_ids) - len(request.first_tokens)
            assert len(request.scores) == (request.sampling.logprobs is not None) * num_new
        if self._held is not None:
            held, self._held = self._held, None
            self.results[0] = self._compute(held, self.state.in_flight[0])
        if oldest.drafts:
            num_samples = Counter(oldest.requests[place] for place in oldest.sampled.tolist())
            self.outcome.rejected += sum(
                count - (len(request.token_ids) - num_known[request])
                for request, count in num_samples.items()
                if request.finish_reason is None
            )
        for request in absorbed.ended:
            self._ended(request)

    def _guess(self, request: Request) -> list[int]:
        """What the request will answer, often with a mistake somewhere."""
        if key(request) not in self._answers:
            new = NewRequest(
                request.request_id,
                request.token_ids[: request.num_prompt_tokens],
                request.max_total_tokens - request.num_prompt_tokens,
                request.sampling,
                is_constrained=request.is_constrained,
            )
            windows = [window for window, _ in self.setup.groups]
            (answer,) = expected_answers([(new, request.index)], self.setup.vocab_size, windows)
            self._answers[key(request)] = answer.tokens
        guess = self._answers[key(request)][request.num_output_tokens :][: request.speculate]
        if guess and self.rng.random() < 0.6:
            place, wrong = self.rng.integers([len(guess), self.setup.vocab_size])
            guess[place] = int(wrong)
        return guess

    def forget_guesses(self) -> None:
        """So that request ids may come again."""
        self._answers.clear()

    def peek(self) -> Peek:
        """What `plan` would do now, tried on a copy."""
        twin = copy.deepcopy(self.scheduler)
        before = {id(request): request for request in twin.state.active()}
        plan = twin.plan()
        gone = [request for request in before.values() if request.state is RequestState.PENDING]
        return Peek(
            plan,
            twin.state.in_flight[-1] if plan is not None else None,
            [request.request_id for request in gone if request.swapped is None],
            [request.request_id for request in gone if request.swapped is not None],
        )

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
        assert self.state.memory.device.is_free, "blocks leaked"
        assert self.state.memory.swap.is_free
        assert not self.state.memory.prefix_cache.num_promised
        assert not self.state.rows.running
        self.worker.check_reserved(self.pristine)
        return self.outcome

    def _note(self, request: Request) -> None:
        """What a client has got by now."""
        who = key(request)
        self.outcome.tokens[who] = request.token_ids[request.num_prompt_tokens :]
        self.outcome.scores[who] = list(request.scores)
        self.outcome.prompt_scores[who] = list(request.prompt_scores)
        if request.beam_score is not None:
            self.outcome.beam_scores[who] = request.beam_score

    def _ended(self, request: Request) -> None:
        assert key(request) not in self.outcome.reasons, "ended twice"
        assert request.finish_reason is not None
        self.outcome.reasons[key(request)] = request.finish_reason
        self.outcome.cached_tokens[key(request)] = request.num_cached_tokens


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
    verify(requests, outcome, setup)
    return outcome


def verify(requests: list[NewRequest], outcome: Outcome, setup: Setup) -> None:
    """Every accepted request ended once; its tokens and log probabilities are right, or right until
    its abort."""
    accepted = [new for new in requests if new.request_id not in outcome.refused]
    windows = [window for window, _ in setup.groups]
    searches = [new for new in accepted if new.beams is not None]
    accepted = [new for new in accepted if new.beams is None]
    family = [(new, new.index + number) for new in accepted for number in range(new.n)]
    answers = expected_answers(family, setup.vocab_size, windows) if family else []
    for new in searches:
        right = expected_beams(new, setup.vocab_size, windows)
        family += [(new, index) for index in range(len(right))]
        answers += right
    assert outcome.reasons.keys() == {(new.request_id, index) for new, index in family}
    for (new, index), right in zip(family, answers, strict=True):
        verify_answer(new, index, right, outcome)


def verify_answer(new: NewRequest, index: int, right: Expected, outcome: Outcome) -> None:
    """One sibling's answer, as `verify` does."""
    who = new.request_id, index
    got = outcome.tokens[who], outcome.scores[who], outcome.prompt_scores[who]
    wanted = right.tokens, right.scores, right.prompt_scores
    if outcome.reasons[who] is FinishReason.ABORT:
        lengths = [len(items) for items in got]
        assert lengths[1] in (0, lengths[0] - len(new.output_token_ids)), who
        assert got == tuple(items[:n] for items, n in zip(wanted, lengths, strict=True)), who
        return
    assert got == wanted, who
    if right.beam_score is not None:
        assert outcome.beam_scores[who] == right.beam_score, who
        assert outcome.reasons[who] is right.reason, who
        return
    has_stopped = bool(right.tokens) and right.tokens[-1] in new.sampling.stop_token_ids
    reason = FinishReason.STOP if has_stopped else FinishReason.LENGTH
    assert outcome.reasons[who] is reason, who
