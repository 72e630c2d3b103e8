"""Log probabilities of prompts: which tokens a step scores, whatever happens to the request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from protos.plan import StepPlan, StepResult
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.core.request import FinishReason, NewRequest, Request, RequestState, Sampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step.absorb import Absorbed
from tests.support.check import check
from tests.support.simulated_run import Setup
from tests.support.without_model import without_model

PROMPT = list(range(100, 121))  # 21 tokens: five pages and one more


class Core:
    """A core whose worker knows that token t has the log probability -t / 1000."""

    def __init__(
        self,
        policy: str = "fifo",
        max_logits: int = 0,
        propose: Callable[[Request], list[int]] = lambda _: [],
        **fields: object,
    ) -> None:
        self.setup = Setup(policy=policy, **fields)  # type: ignore[arg-type]
        geometry = replace(self.setup.geometry(), max_logits=max_logits)
        self.scheduler = Scheduler(self.setup.limits(), geometry, POLICIES[policy], propose)
        self.state = self.scheduler.state
        self.max_logits = max_logits

    def submit(self, name: str, max_tokens: int = 0, **fields: object) -> Request:
        new = NewRequest(name, PROMPT, max_tokens, prompt_logprobs=1)
        return self.scheduler.submit(replace(new, **fields))[0]  # type: ignore[arg-type]

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan is not None
        if self.max_logits:
            assert len(plan.logits_indices) <= self.max_logits
            assert len(plan.sample_rows) <= max(self.max_logits, self.setup.max_requests)
        before = plan.logits_indices[plan.score_logits]
        inside = ~np.isin(before + 1, plan.query_start_loc)  # the next token is in the step, too
        assert (plan.token_ids[before[inside] + 1] == plan.score_tokens[inside]).all()
        return plan

    def absorb(self, plan: StepPlan) -> Absorbed:
        result = answered(plan)
        assert self.scheduler.why_invalid(result, 200) is None
        absorbed = self.scheduler.absorb(result)
        check(self.state)
        return absorbed

    def run(self) -> list[int]:
        """To the end; the number of scored tokens of each step."""
        counts, plans = [], []
        while self.state.requests:
            while (plan := self.scheduler.plan()) is not None:
                plans.append(plan)
                counts.append(len(plan.score_tokens))
            self.absorb(plans.pop(0))
        return counts


def answered(plan: StepPlan) -> StepResult:
    result = without_model(plan)
    return replace(result, logprobs=(-result.candidate_ids / 1000).astype(np.float32))


def assert_scored(request: Request) -> None:
    assert [score.token_id for score in request.prompt_scores] == PROMPT[1:]
    for score in request.prompt_scores:
        assert score.logprob == pytest.approx(-score.token_id / 1000)
        assert score.top == ((0, 0.0),)
        assert score.rank == 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "priority", "static"])
def test_chunks_score_each_token_once(depth: int, max_tokens: int, policy: str) -> None:
    """The token behind a chunk's end is scored twice, or never; the last one waits for another."""
    core = Core(policy, max_batch_tokens=8, max_plans_in_flight=depth)
    request = core.submit("a", max_tokens)
    counts = core.run()
    assert counts[:3] == [8, 8, 4]
    assert sum(counts) == 20
    assert_scored(request)
    assert request.num_output_tokens == max_tokens
    assert request.finish_reason is FinishReason.LENGTH


def test_a_scoring_request_publishes_its_prompt_and_uses_no_hit() -> None:
    """Tokens of a hit get no score; or scoring leaves nothing to share."""
    core = Core()
    core.submit("a")
    core.run()
    plain = core.submit("plain", 1, prompt_logprobs=None)
    core.run()
    assert plain.num_cached_tokens == 20
    again = core.submit("b", 2)
    assert core.run()[0] == 20
    assert_scored(again)
    assert again.num_cached_tokens == 0


@pytest.mark.parametrize("swap_chunks", [0, 20])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_returned", [0, 1, 2])
def test_after_a_preemption_only_the_rest_is_scored(
    swap_chunks: int, depth: int, num_returned: int
) -> None:
    """Scores are lost, doubled, or come twice from the worker; the hit covers too much."""
    core = Core(max_batch_tokens=8, max_plans_in_flight=depth, swap_chunks=swap_chunks)
    request = core.submit("a", 2)
    plans = [core.plan()]
    for _ in range(num_returned):
        core.absorb(plans.pop(0))
        plans.append(core.plan())
    core.state.preempt([request])
    check(core.state)
    while plans:
        core.absorb(plans.pop(0))  # late
    assert len(request.prompt_scores) == min(20, 8 * (num_returned + 1))
    assert sum(core.run()) == 20 - len(PROMPT[1 : 1 + 8 * (num_returned + 1)])
    assert_scored(request)
    assert core.state.counters.soft_resets == (not swap_chunks)


def test_a_hit_covers_what_is_scored_already() -> None:
    """After a reset, scored tokens are computed again; or unscored ones are skipped."""
    core = Core(max_batch_tokens=10)
    request = core.submit("a", 2)
    core.absorb(core.plan())
    core.state.preempt([request])
    plan = core.plan()
    assert plan.seq_lens.tolist() == [18]  # two whole pages of the ten scored tokens
    assert plan.score_tokens.tolist() == PROMPT[11:19]


@pytest.mark.parametrize("is_fault", [False, True])
def test_a_lost_worker_loses_no_score(is_fault: bool) -> None:
    """Scores that had returned are asked for again, those in flight are not."""
    core = Core(max_batch_tokens=8, max_plans_in_flight=2)
    request = core.submit("a", 2)
    core.absorb(core.plan())
    core.plan()
    core.plan()
    core.scheduler.lose_worker(core.setup.geometry(), core.state.next_step_id if is_fault else 0)
    assert len(request.prompt_scores) == 8
    assert core.run()[:3] == [0, 8, 4]
    assert_scored(request)


def test_only_the_first_sibling_scores() -> None:
    """The prompt is scored once for each sibling, or into one list that all share."""
    core = Core()
    requests = core.scheduler.submit(NewRequest("a", PROMPT, 2, n=3, prompt_logprobs=0))
    plan = core.plan()
    assert len(plan.score_tokens) == 20
    assert len(plan.logits_indices) == 21
    assert len(plan.sample_rows) == 3
    core.absorb(plan)
    assert [len(request.prompt_scores) for request in requests] == [20, 0, 0]


def test_what_is_new_is_reported() -> None:
    """The engine does not learn that there are scores to send."""
    core = Core(max_batch_tokens=16)
    request = core.submit("a", 2)
    assert core.absorb(core.plan()).scored == [request]
    assert core.absorb(core.plan()).scored == [request]
    assert core.absorb(core.plan()).scored == []


@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "priority", "static"])
@pytest.mark.parametrize("max_logits", [4, 5, 12])
def test_no_step_needs_more_logits_than_the_worker_has(policy: str, max_logits: int) -> None:
    """A long prompt overruns the worker's buffer, or two share the last place for ever."""
    core = Core(policy, max_logits, max_batch_tokens=24, max_requests=4)
    n = 1 if policy == "static" else 2
    asked = [
        core.submit("s1"), core.submit("s2", 3), core.submit("p1", 6, prompt_logprobs=None),
        core.submit("s3", 4, n=n), core.submit("p2", 6, prompt_logprobs=None), core.submit("s4", 1),
    ]  # fmt: skip
    for _ in range(300):
        if not core.state.requests:
            break
        core.absorb(core.plan())
    assert not core.state.requests
    for request in asked:
        if request.prompt_logprobs is not None:
            assert_scored(request)


@pytest.mark.parametrize(
    ("max_logits", "max_batch_tokens", "num_drafts", "num_scores"),
    [(14, 64, 6, 7), (4, 64, 1, 2), (64, 64, 9, 20), (4, 4, 1, 2)],
)
def test_drafts_and_prompts_share_the_logits(
    max_logits: int, max_batch_tokens: int, num_drafts: int, num_scores: int
) -> None:
    """Draft tokens take what scores need, or the row of who waits; or scores are cut although the
    worker has logits for all tokens of a step."""
    core = Core(max_logits=max_logits, max_requests=4, max_batch_tokens=max_batch_tokens,
                propose=lambda request: [1] * 9)  # fmt: skip
    core.scheduler.submit(NewRequest("d", [1, 2], 50, speculate=9))
    core.absorb(core.plan())
    core.submit("a")
    plan = core.plan()
    assert len(plan.sample_rows) == 1 + num_drafts
    assert len(plan.score_tokens) == num_scores


def test_few_logits_are_not_kept_for_nobody() -> None:
    """Logits for rows that nobody has stay unused, and a prompt is scored token by token; or it
    takes them all, and others wait for its end."""
    core = Core(max_logits=8, max_requests=8)
    core.submit("a")
    core.absorb(plan := core.plan())
    assert len(plan.score_tokens) == 8
    plain = core.submit("plain", 9, prompt_logprobs=None, prompt_token_ids=[1, 2])
    core.absorb(plan := core.plan())
    assert len(plan.score_tokens) == 7
    assert plain.num_output_tokens == 1


@pytest.mark.parametrize("max_logits", [0, 64])
def test_many_requests_score_at_the_speed_of_prompts(max_logits: int) -> None:
    """Scores are counted against what samples need, and steps stay half empty."""
    core = Core(max_logits=max_logits, max_batch_tokens=64, max_requests=64)
    for number in range(200):
        core.submit(f"r{number}", prompt_logprobs=0)
    assert len(core.run()) == -(-200 * 21 // 64)


def test_a_request_that_has_ended_is_not_scored() -> None:
    """A result that comes after an abort is sent to nobody's stream."""
    core = Core(max_batch_tokens=8)
    request = core.submit("a")
    plan = core.plan()
    core.scheduler.finish(request)
    absorbed = core.absorb(plan)
    assert (absorbed.scored, request.prompt_scores) == ([], [])


def test_one_token_has_nothing_to_score() -> None:
    """It waits for a score that never comes."""
    core = Core()
    request = core.submit("a", prompt_token_ids=[5])
    assert core.run() == [0]
    assert request.state is RequestState.FINISHED


WRONG = {
    "rank 0": ("ranks", 3, 0, "a rank is 0"),
    "rank": ("ranks", 3, 202, "a rank is 202"),
    "candidate": ("candidate_ids", 3, 200, "candidate 200"),
    "negative": ("candidate_ids", 3, -1, "candidate -1"),
    "another token": ("candidate_ids", 2, 5, "token 5 where 101"),
    "nan": ("logprobs", 3, np.nan, "nan"),
    "positive": ("logprobs", 3, 0.5, "0.5"),
    "infinite": ("logprobs", 3, np.inf, "inf"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_report_that_contradicts_the_plan_is_refused(name: str) -> None:
    """A broken worker's numbers reach a client, or crash the engine."""
    core = Core()
    core.submit("a", 1, sampling=Sampling(logprobs=1))
    result = answered(core.plan())
    array, place, value, why = WRONG[name]
    assert core.scheduler.why_invalid(result, 200) is None
    getattr(result, array)[place] = value
    assert why in (core.scheduler.why_invalid(result, 200) or "")


@pytest.mark.parametrize("array", ["ranks", "candidate_ids", "logprobs"])
def test_too_few_reports_are_refused(array: str) -> None:
    """They end in the middle of a prompt, and the engine crashes."""
    core = Core()
    core.submit("a", 1, sampling=Sampling(logprobs=1))
    result = answered(core.plan())
    short = replace(result, **{array: getattr(result, array)[:-1]})
    assert "21 reports of 42" in (core.scheduler.why_invalid(short, 200) or "")


def test_reports_of_a_row_that_is_not_finite_may_be_anything() -> None:
    """One request's NaN ends the worker's session, and everybody waits for the next one."""
    core = Core()
    broken, sound = core.submit("a", 1), core.submit("b", 1, sampling=Sampling(logprobs=1))
    plan = core.plan()
    result = answered(plan)
    result.logprobs[:] = np.where(np.arange(len(result.logprobs)) < 2 + 40, np.nan, -0.5)
    result.logprobs[:2] = -0.5  # the sample of the second row comes first
    assert "nan" in (core.scheduler.why_invalid(result, 200) or "")
    result.is_finite[0] = 0
    assert core.scheduler.why_invalid(result, 200) is None
    absorbed = core.scheduler.absorb(result)
    assert absorbed.not_finite == [broken]
    assert (len(broken.prompt_scores), len(sound.prompt_scores)) == (0, 20)


def test_a_token_of_the_prompt_may_lie_beyond_the_vocabulary() -> None:
    """A model with more embeddings than logits loses its worker whenever a prompt uses one."""
    core = Core()
    core.submit("a", prompt_token_ids=[1, 205, 3])
    result = answered(core.plan())
    result.ranks[0] = 201
    assert core.scheduler.why_invalid(result, 200) is None


def test_an_impossible_token_has_an_infinitely_negative_log_probability() -> None:
    """A model that masks a token of the prompt kills its worker's session."""
    core = Core()
    core.submit("a")
    result = answered(core.plan())
    result.logprobs[4] = -np.inf
    assert core.scheduler.why_invalid(result, 200) is None


@pytest.mark.parametrize("k", [0, 2])
def test_scores_of_samples_are_kept_with_their_tokens(k: int) -> None:
    """An answer's log probabilities shift by one, or a rejected draft's is kept."""
    core = Core(propose=lambda _: [0, 7])
    (request,) = core.scheduler.submit(
        NewRequest("a", [1, 2], 6, Sampling(logprobs=k), speculate=2)
    )
    core.scheduler.submit(NewRequest("b", [1, 2], 6))
    core.run()
    assert request.num_drafted
    assert request.token_ids[2:] == [0] * 6
    assert [score.token_id for score in request.scores] == [0] * 6
    assert {len(score.top) for score in request.scores} == {k}
