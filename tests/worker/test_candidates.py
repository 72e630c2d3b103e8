"""Log probabilities, ranks and the most probable tokens, of samples, beams and scores."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from protos.plan import StepPlan
from tests.support.plan_builder import COMPUTED, plan_of
from tests.support.runners import pad_steps
from tests.support.sampled_steps import Case, by_answer, plan_of_cases, run_cases
from tests.support.tiny_models import VOCAB_SIZE, gemma3, llama
from worker.batch.plan_values import InvalidPlan
from worker.memory import step_memory
from worker.step import candidates
from worker.step.largest import largest, ordered_keys

INF = math.inf


def random_logits(seed: int, rows: int, vocab_size: int = 50) -> torch.Tensor:
    """Rounded, so that some are equal."""
    generator = torch.Generator().manual_seed(seed)
    return (6 * torch.randn(rows, vocab_size, generator=generator)).round() / 2


def by_hand(logits: torch.Tensor, own: int, k: int) -> tuple[int, list[tuple[int, float]]]:
    """Rank and entries of one row [V]."""
    logprobs = logits.log_softmax(dim=-1).tolist()
    best = sorted(range(len(logprobs)), key=lambda token: (-logprobs[token], token))[:k]
    rank = 1 + sum(value > logprobs[own] for value in logprobs)
    return rank, [(token, logprobs[token]) for token in (own, *best)]


def test_samples_and_scores_are_answered_in_the_plans_order() -> None:
    """Samples with different k beside some that ask for nothing, then scores."""
    logits = random_logits(1, 6)
    ks = [3, -1, 0, 50, 3]
    plan = plan_of_cases(
        [Case(num_candidates=k, settings={"temperature": 1.0}, u=0.9) for k in ks],
        logits_indices=range(6),
        score_logits=[5, 0, 2, 5],
        score_tokens=[7, 49, 0, 8],
        score_candidates=[2, 0, 50, 2],
    )
    for at_once in (100, 2):
        got = run_cases(logits, plan, at_once=at_once)
        wanted = [(i, got.tokens[i], k) for i, k in enumerate(ks) if k >= 0]
        wanted += [(5, 7, 2), (0, 49, 0), (2, 0, 50), (5, 8, 2)]
        expected = [by_hand(logits[row], own, k) for row, own, k in wanted]
        assert got.ranks.tolist() == [rank for rank, _ in expected]
        assert got.candidates == [entries for _, entries in expected]


def test_logprobs_are_raw() -> None:
    """As vLLM's default: whatever temperature, penalties, biases and masks did to the choice."""
    logits = random_logits(2, 4)
    settings = {"repetition_penalty": 3.0, "temperature": 0.5, "top_k": 2}
    banned = [(token, -INF) for token in range(0, 50, 2)]
    changed = Case([1, 2, 3], [4], settings, bias=banned, num_candidates=4)
    plain = Case(num_candidates=4)
    plan = plan_of_cases([changed, plain, changed, changed])
    plan = replace(
        plan,
        score_logits=np.array([0, 3], np.int32),
        score_tokens=np.array([9, 9], np.int32),
        score_candidates=np.array([1, 1], np.int32),
    )
    for masks in (None, {2: range(40), 3: range(5)}):
        plan = replace(plan, awaits_mask=masks is not None)
        got = run_cases(logits, plan, masks=masks)
        expected = [by_hand(logits[i], got.tokens[i], 4) for i in range(4)]
        expected += [by_hand(logits[i], 9, 1) for i in (0, 3)]
        assert got.candidates == [entries for _, entries in expected]
        assert got.ranks.tolist() == [rank for rank, _ in expected]


def test_beams_see_changed_log_probabilities() -> None:
    """As transformers' beam search: log_softmax, then processors; and no logits but their own."""
    logits = random_logits(3, 3)
    settings = {"repetition_penalty": 2.0}
    case = Case(
        [1, 2], [3, 4], settings, bias=[(6, 1.5), (7, -INF)], num_candidates=6, is_beam=True
    )
    plan = plan_of_cases([Case(num_candidates=2), case, replace(case, bias=[], num_candidates=50)])
    got = run_cases(logits, plan)
    for row in (1, 2):
        expected = logits[row].log_softmax(dim=-1)
        if row == 1:
            expected[6] += 1.5
        for token in (1, 2, 3, 4):
            expected[token] *= 2.0
        if row == 1:
            expected[7] = -INF
        order = sorted(range(50), key=lambda t: (-float(expected[t]), t))
        entries = [(token, float(expected[token])) for token in order][: 6 if row == 1 else 50]
        assert got.candidates[row] == [entries[0], *entries]
    assert got.ranks[1:].tolist() == [1, 1]
    assert got.candidates[0] == by_hand(logits[0], got.tokens[0], 2)[1]


def test_a_beam_under_a_mask_gets_what_the_mask_allows() -> None:
    """Candidates outside of the grammar would be followed."""
    case = Case(num_candidates=5, is_beam=True)
    got = run_cases(random_logits(4, 1), plan_of_cases([case]), masks={0: [3, 8, 9]})
    entries = got.candidates[0]
    assert {token for token, _ in entries[:4]} == {3, 8, 9}
    assert [value for _, value in entries[4:]] == [-INF, -INF]


def test_a_token_without_logits_has_probability_zero() -> None:
    """A prompt may hold ids beyond the vocabulary; they cannot be what the model expects."""
    plan = plan_of(logits_indices=[0], score_logits=[0], score_tokens=[60], score_candidates=[1])
    got = run_cases(random_logits(5, 1), plan)
    assert got.ranks.tolist() == [51]
    assert got.candidates[0][0] == (60, -INF)


def test_logits_that_are_not_finite_are_answered_with_valid_ids() -> None:
    """Their request fails; the step, and their neighbours, must not."""
    logits = random_logits(6, 4)
    logits[0], logits[1, 7], logits[2] = math.nan, INF, -INF
    plan = plan_of_cases([Case(num_candidates=3, is_beam=i == 0) for i in range(4)])
    got = run_cases(logits, plan)
    assert all(0 <= token < 50 for entries in got.candidates for token, _ in entries)
    assert got.candidates[3] == by_hand(logits[3], got.tokens[3], 3)[1]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_log_probabilities_do_not_depend_on_neighbours(
    monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    """A score must not change with what else is in the step: equal bits, in any slice."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    logits = torch.randn(16, 49152, generator=torch.Generator().manual_seed(1))
    together = run_cases(logits, plan_of_cases([Case(num_candidates=5)] * 16))
    monkeypatch.setattr(candidates, "MOST_AT_ONCE", 3 * 49152)
    assert run_cases(logits, plan_of_cases([Case(num_candidates=5)] * 16)).candidates == (
        together.candidates
    )
    for row in (0, 7, 15):
        alone = run_cases(logits[row : row + 1].clone(), plan_of_cases([Case(num_candidates=5)]))
        assert alone.candidates == [together.candidates[row]]
    torch.set_num_threads(before)


@pytest.mark.parametrize("size", [1, 2, 17, 299, 300])
def test_largest_takes_the_lower_id_of_equals(size: int) -> None:
    """On every device: a CUDA device sorts keys, whose order is compared here."""
    generator = torch.Generator().manual_seed(size)
    values = torch.randint(-3, 3, (20, 300), generator=generator).float() / 2
    values[:5, ::7] = -0.0
    values[5:9, ::5] = -INF
    values[9, 3] = INF
    expected = [sorted(range(300), key=lambda i: (-row[i], i))[:size] for row in values.tolist()]
    assert largest(values, size).tolist() == expected
    keys = ordered_keys(values).topk(size, dim=-1).values
    assert (299 - keys.remainder(2**32)).tolist() == expected


# Through the runner


def prompt_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


def scoring_plan(plan: StepPlan, prompt: list[int], k: int) -> StepPlan:
    """The plan of a chunk of `prompt` alone, which scores each of the chunk's tokens that has a
    next one; the last chunk samples, too."""
    end, count = int(plan.seq_lens[0]), len(plan.token_ids)
    scored = [i for i in range(count) if end - count + i + 1 < len(prompt)]
    is_last = end == len(prompt)
    sampled = {"sample_logits": [len(scored)], "sample_rows": plan.rows} if is_last else {}
    return plan_of(
        plan.step_id,
        **{
            name: getattr(plan, name)
            for name in COMPUTED
        },
        **sampled,
        logits_indices=range(len(scored) + is_last),
        score_logits=range(len(scored)),
        score_tokens=[prompt[end - count + i + 1] for i in scored],
        score_candidates=[k] * len(scored),
        num_candidates=[k] * is_last,
    )  # fmt: skip


@pytest.mark.parametrize("make", [llama, gemma3])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("max_batch_tokens", [64, 9])
def test_prompt_logprobs_equal_transformers(served, saved, make, is_padded, max_batch_tokens):
    """Whole, and in chunks; more logits than there are rows, so that a padded step has no static
    shape."""
    prompt, k = prompt_of(33), 4
    _, model = saved(make)
    it = served(make, max_batch_tokens=max_batch_tokens, max_requests=4)
    if is_padded:
        pad_steps(it.runner)
    with torch.inference_mode():
        right = model(torch.tensor([prompt])).logits[0].float().log_softmax(dim=-1)
    it.core.submit_prompts(prompt)
    got: list[list[tuple[int, float]]] = []
    ranks: list[int] = []
    while len(got) < len(prompt):
        planned = it.core.plan()
        assert planned is not None
        plan = scoring_plan(planned, prompt, k)
        result = it.step(plan)
        # samples come first in a result, and are last in the prompt
        answers = by_answer(plan, result.candidate_ids, result.logprobs)
        num_samples = len(plan.sample_rows)
        got += answers[num_samples:] + answers[:num_samples]
        ranks += [*result.ranks[num_samples:].tolist(), *result.ranks[:num_samples].tolist()]
        assert result.is_finite.tolist() == [1]
        it.core.absorb(replace(result, ranks=result.ranks[:0], candidate_ids=result.ranks[:0],
                               logprobs=result.logprobs[:0]))  # fmt: skip
    worst = 0.0
    for position, entries in enumerate(got):
        own = prompt[position + 1] if position + 1 < len(prompt) else entries[0][0]
        assert entries[0][0] == own
        expected = right[position]
        assert [token for token, _ in entries[1:]] == expected.topk(k).indices.tolist()
        assert ranks[position] == 1 + int((expected > expected[own]).sum())
        worst = max(worst, *(abs(value - float(expected[token])) for token, value in entries))
    print(f"\n{make.__name__}, steps of {max_batch_tokens}: {len(got)} tokens, {worst:.1e} off")
    assert worst < 1e-4


def test_logits_per_step_are_bounded_and_reported(served, monkeypatch):
    """The scheduler plans by it; more would take memory that was not planned. Every row can sample,
    and some prompt be scored beside them, whatever the vocabulary."""
    assert served(llama, max_batch_tokens=40).runner.ready().max_logits == 40
    monkeypatch.setattr(step_memory, "_MOST_LOGITS_CPU", 3 * VOCAB_SIZE)
    wide = {"max_batch_tokens": 200, "max_requests": 30}
    assert served(llama, **wide).runner.ready().max_logits == 30 + 64
    monkeypatch.setattr(step_memory, "_FEWEST_SCORES", 6)
    it = served(llama, max_batch_tokens=40, max_requests=4)
    assert it.runner.ready().max_logits == 10
    prompt = prompt_of(11)
    plan = scoring_plan(it.first_plan(prompt), prompt, 0)
    with pytest.raises(InvalidPlan, match="logits_indices has 11 entries; allowed: 10"):
        it.step(plan)
    it = served(llama, max_batch_tokens=40, max_requests=4)
    fitting = scoring_plan(it.first_plan(prompt[:10]), prompt[:10], 0)
    assert len(it.step(fitting).ranks) == 10


def test_drafts_are_verified_beyond_the_rows(served):
    """Four rows with eight samples each: more samples, and logits, than rows."""
    drafts = [prompt_of(9 + i) for i in range(4)]
    it = served(llama, max_batch_tokens=64, max_requests=4)
    plan = it.first_plan(*drafts)
    ends = plan.query_start_loc[1:]
    indices = np.concatenate([np.arange(end - 8, end) for end in ends])
    plan = plan_of(
        **{
            name: getattr(plan, name)
            for name in COMPUTED
        },
        logits_indices=indices,
        sample_logits=range(32),
        sample_rows=np.repeat(plan.rows, 8),
        num_candidates=[0] * 32,
    )  # fmt: skip
    result = it.step(plan)
    assert result.token_ids.tolist() == it.logits[-1].argmax(dim=-1).tolist()
    assert result.ranks.tolist() == [1] * 32
    last = it.runner._last_token[torch.from_numpy(plan.rows).long()]
    assert last.tolist() == result.token_ids[7::8].tolist()
