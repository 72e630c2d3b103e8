"""The arrays of a plan that penalties, biases, log probabilities and grammars add for their own
samples, and only for these."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from protos.plan import ANY_TOKEN, NO_CANDIDATES, UNKNOWN_TOKEN, StepPlan, StepResult
from scheduler_svc.core.policies import STATIC
from scheduler_svc.core.request import NewRequest, Request, Sampling
from scheduler_svc.core.scheduler import Scheduler
from tests.support.simulated_run import Setup
from tests.support.without_model import without_model

PROMPT = [1, 2, 3, 2]
PENALISED = Sampling(repetition_penalty=1.5)


def scheduler(
    depth: int = 1, propose: Callable[[Request], Sequence[int]] = lambda _: (), **fields: int
) -> Scheduler:
    setup = Setup(max_plans_in_flight=depth, **fields)  # type: ignore[arg-type]
    return Scheduler(setup.limits(), setup.geometry(), propose=propose)


def planned(core: Scheduler) -> StepPlan:
    plan = core.plan()
    assert plan is not None
    return plan


def answered(plan: StepPlan, *token_ids: int) -> StepResult:
    return StepResult(
        plan.step_id, 0, 0, np.array(token_ids, np.int32), np.ones(len(plan.rows), np.int32)
    )


def history(plan: StepPlan, sample: int) -> dict[int, int]:
    begin, end = plan.history_start[sample : sample + 2].tolist()
    tokens = plan.history_tokens[begin:end].tolist()
    assert len(set(tokens)) == len(tokens)
    return dict(zip(tokens, plan.history_counts[begin:end].tolist(), strict=True))


def biases(plan: StepPlan, sample: int) -> list[tuple[int, int, float]]:
    begin, end = plan.bias_start[sample : sample + 2].tolist()
    arrays = plan.bias_tokens, plan.bias_after, plan.bias
    return list(zip(*(array[begin:end].tolist() for array in arrays), strict=True))


def test_only_samples_with_penalties_have_a_history() -> None:
    """Every row pays for one row's penalties, or a neutral one counts as one."""
    core = scheduler()
    core.submit(NewRequest("plain", PROMPT, 4, Sampling(temperature=0.7, top_k=4)))
    core.submit(NewRequest("penalised", PROMPT, 4, PENALISED))
    core.submit(NewRequest("neutral", PROMPT, 4, Sampling(repetition_penalty=1.0)))
    plan = planned(core)
    assert np.diff(plan.history_start).tolist() == [0, 3, 0]
    assert history(plan, 1) == {1: 0, 2: 0, 3: 0}
    core.absorb(answered(plan, 2, 2, 2))
    plan = planned(core)
    assert np.diff(plan.history_start).tolist() == [0, 3, 0]
    assert history(plan, 1) == {1: 0, 2: 1, 3: 0}
    core.absorb(answered(plan, 9, 9, 9))
    assert history(planned(core), 1) == {1: 0, 2: 1, 3: 0, 9: 1}


@pytest.mark.parametrize("field", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_each_penalty_asks_for_it(field: str) -> None:
    """A penalty by itself has no effect."""
    core = scheduler()
    core.submit(NewRequest("a", PROMPT, 4, Sampling(**{field: 0.5})))  # type: ignore[arg-type]
    assert history(planned(core), 0) == {1: 0, 2: 0, 3: 0}


def test_a_token_that_only_the_device_knows_is_counted_in_addition() -> None:
    """Under run-ahead the last token is not penalised, or counted twice once it is known."""
    core = scheduler(depth=2)
    core.submit(NewRequest("a", PROMPT, 4, PENALISED))
    first, second = planned(core), planned(core)
    assert history(second, 0) == {1: 0, 2: 0, 3: 0, UNKNOWN_TOKEN: 1}
    core.absorb(answered(first, 5))
    third = planned(core)
    assert history(third, 0) == {1: 0, 2: 0, 3: 0, 5: 1, UNKNOWN_TOKEN: 1}
    core.absorb(answered(second, 5))
    core.absorb(answered(third, 1))
    assert history(planned(core), 0) == {1: 1, 2: 0, 3: 0, 5: 2}


def test_each_sample_of_a_verification_sees_the_drafts_before_it() -> None:
    """Penalties of the second sample do not know the first draft token: speculation would change
    what is sampled."""
    guesses = [[7, 8, 8], []]
    core = scheduler(max_requests=4, propose=lambda _: guesses.pop(0))
    (request,) = core.submit(NewRequest("a", PROMPT, 9, PENALISED, speculate=3))
    core.absorb(answered(planned(core), 7))
    plan = planned(core)
    before = [[7], [7, 7], [7, 7, 8], [7, 7, 8, 8]]
    prompt = dict.fromkeys(PROMPT, 0)
    assert [history(plan, sample) for sample in range(4)] == [prompt | Counter(b) for b in before]
    core.absorb(answered(plan, 7, 8, 4, 4))
    assert (request.num_drafted, request.num_accepted) == (3, 2)
    counters = core.state.counters
    assert (counters.drafted, counters.accepted) == (3, 2)
    assert history(planned(core), 0) == prompt | Counter([7, 7, 8, 4])


def test_siblings_have_histories_of_their_own() -> None:
    """Forked siblings share one history, and are penalised for each other's tokens."""
    core = scheduler()
    core.submit(NewRequest("a", PROMPT, 4, PENALISED, n=2))
    core.absorb(answered(planned(core), 8, 9))
    plan = planned(core)
    prompt = dict.fromkeys(PROMPT, 0)
    assert [history(plan, 0), history(plan, 1)] == [prompt | {8: 1}, prompt | {9: 1}]


def test_a_resumed_answer_counts_what_was_delivered() -> None:
    """Penalties and min_tokens take delivered tokens for a part of the prompt."""
    core = scheduler()
    sampling = Sampling(
        repetition_penalty=1.5, min_tokens=4, stop_token_ids=frozenset({9}), bad_words=((6, 7),)
    )
    core.submit(NewRequest("a", PROMPT, 9, sampling, output_token_ids=[2, 8, 6]))
    plan = planned(core)
    assert history(plan, 0) == {1: 0, 2: 1, 3: 0, 8: 1, 6: 1}
    assert biases(plan, 0) == [(9, ANY_TOKEN, -math.inf), (7, ANY_TOKEN, -math.inf)]
    core.absorb(answered(plan, 5))
    assert biases(planned(core), 0) == []


def test_biases_stand_with_their_samples() -> None:
    """One row's ban hits its neighbour."""
    core = scheduler(depth=2)
    core.submit(NewRequest("a", PROMPT, 4, Sampling(logit_bias=((3, 2.0),))))
    core.submit(NewRequest("b", PROMPT, 4))
    core.submit(NewRequest("c", PROMPT, 4, Sampling(bad_words=((3, 2, 5), (4, 6)))))
    plan = planned(core)
    assert np.diff(plan.bias_start).tolist() == [1, 0, 1]
    assert biases(plan, 0) == [(3, ANY_TOKEN, 2.0)]
    assert biases(plan, 2) == [(5, ANY_TOKEN, -math.inf)]
    ahead = planned(core)
    assert biases(ahead, 2) == [(6, 4, -math.inf)]


def test_a_plan_awaits_a_mask_only_for_constrained_samples() -> None:
    """The worker waits for a mask that nobody sends, or does not wait for one that comes."""
    core = scheduler(propose=lambda _: [5, 6], max_batch_tokens=8, max_requests=4)
    core.submit(NewRequest("plain", PROMPT, 9))
    core.absorb(answered(planned(core), 1))
    (request,) = core.submit(NewRequest("a", [*range(12)], 9, is_constrained=True, speculate=2))
    plan = planned(core)
    assert (len(plan.token_ids), plan.awaits_mask) == (8, False)
    core.absorb(answered(plan, 1))
    plan = planned(core)
    assert plan.awaits_mask
    (sample,) = core.state.in_flight[-1].constrained_samples()
    assert sample == (1, request, 12, ())
    core.absorb(answered(plan, 1, 2))
    plan = planned(core)
    step = core.state.in_flight[-1]
    core.absorb(answered(plan, 1, 5, 6, 7))
    assert step.constrained_samples() == [
        (1, request, 13, ()), (2, request, 14, (5,)), (3, request, 15, (5, 6)),
    ]  # fmt: skip
    assert plan.sample_rows[1:].tolist() == [request.row] * 3


def test_without_any_of_it_the_arrays_are_empty() -> None:
    """Rows that ask for nothing cost bytes on the wire."""
    core = scheduler()
    core.submit(NewRequest("a", PROMPT, 4))
    core.submit(NewRequest("b", PROMPT, 4))
    plan = planned(core)
    assert not plan.awaits_mask
    assert plan.num_candidates.tolist() == [NO_CANDIDATES] * 2
    sizes = [len(plan.history_tokens), len(plan.bias), len(plan.score_tokens)]
    assert sizes == [0, 0, 0]


def test_ended_rows_of_a_static_batch_ask_for_nothing_more() -> None:
    """A grammar is asked for the mask of an answer that has ended."""
    setup = Setup(policy="static")
    core = Scheduler(setup.limits(), setup.geometry(), STATIC)
    sampling = Sampling(stop_token_ids=frozenset({9}), logprobs=1, logit_bias=((3, 1.0),),
                        presence_penalty=1.0)  # fmt: skip
    requests: list[Request] = []
    for name in "ab":
        requests += core.submit(NewRequest(name, PROMPT, 6, sampling, is_constrained=True))
    plan = planned(core)
    assert plan.awaits_mask
    result = without_model(plan)
    result.candidate_ids[2] = result.token_ids[1] = 9
    core.absorb(result)
    assert [len(request.scores) for request in requests] == [1, 1]
    plan = planned(core)
    assert len(plan.rows) == 2
    assert len(plan.sample_rows) == 1
    assert [sample.request for sample in core.state.in_flight[-1].constrained_samples()] == [
        requests[0]
    ]
    assert len(plan.num_candidates) == 1
    core.absorb(without_model(plan))
    assert [len(request.scores) for request in requests] == [2, 1]
