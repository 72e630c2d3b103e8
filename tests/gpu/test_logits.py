"""Penalties, masks, candidates and scores: the device against the CPU, and what they cost."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from protos import link_pb2
from protos.plan import StepPlan, StepResult
from tests.gpu.card import DEVICE, seconds_on_device, sized
from tests.gpu.conftest import NewTable
from tests.support import tiny_models
from tests.support.in_process import InProcess
from tests.support.loading import load
from tests.support.plan_builder import COMPUTED, plan_of
from tests.support.sampled_steps import (
    Case,
    by_answer,
    mask_message,
    plan_of_cases,
    ready_to_sample,
    run_cases,
    sample_on,
)
from worker.step.candidates import joined
from worker.step.sample_inputs import prepare_samples

VOCAB_SIZE = sized(152_064, 400)
ROWS = sized(64, 4)
HISTORY = sized(2000, 30)
K = 20


def cases_of(what: str) -> list[Case]:
    """ROWS samples, greedy: what the device draws otherwise may differ by a rounding."""
    rng = np.random.default_rng(3)
    made = []
    for _ in range(ROWS):
        case = Case()
        if what in ("penalties", "everything"):
            case.prompt, case.output = rng.integers(VOCAB_SIZE, size=(2, HISTORY)).tolist()
            case.settings = {"repetition_penalty": 1.3, "frequency_penalty": 0.1}
            case.run_ahead = True
        if what in ("biases and bans", "everything"):
            tokens = rng.permutation(VOCAB_SIZE)[:300].tolist()
            case.bias = [(t, -math.inf if t % 2 else float(rng.normal())) for t in tokens]
        if what in (f"{K} candidates", "everything"):
            case.num_candidates = K
        if what == "rank alone":
            case.num_candidates = 0
        if what == f"beams of {K} candidates":
            case.is_beam, case.num_candidates = True, K
        made.append(case)
    return made


KINDS = (
    "nothing", "penalties", "biases and bans", "masks", "rank alone", f"{K} candidates",
    f"beams of {K} candidates", "everything",
)  # fmt: skip


def test_edits_and_candidates(table: NewTable) -> None:
    """They are computed row by row outside of graphs; sums of floating-point numbers aside, nothing
    may come out differently than on the CPU, whose results the other tests check."""
    rows = table(
        f"Penalties, masks and candidates: {ROWS} rows of {VOCAB_SIZE} tokens, ms",
        ["what all rows ask for", "ms", "same tokens", "same candidates"],
        f"Greedy; histories of {2 * HISTORY} tokens, 300 biases. On the device; what the host "
        f"needs to launch it is not in it.",
    )
    logits = (8 * torch.randn(ROWS, VOCAB_SIZE)).round() / 4  # many equals
    for what in KINDS:
        plan = plan_of_cases(cases_of(what))
        masks = None
        if what in ("masks", "everything"):
            masks = {row: range(row, VOCAB_SIZE, 3) for row in range(ROWS)}
            plan = replace(plan, awaits_mask=True)
        last = np.arange(ROWS).tolist()
        right = run_cases(logits, plan, last_tokens=last, masks=masks)
        inputs = prepare_samples(plan, VOCAB_SIZE, ROWS)
        tokens, answers = sample_on(logits.to(DEVICE), plan, inputs, last, masks)
        same_candidates: bool | str = ""
        if answers:
            ranks, ids, logprobs = inputs.answer_order.restore(
                *(part.cpu().numpy() for part in joined(answers))
            )
            got = by_answer(plan, ids, logprobs)
            same_candidates = ranks.tolist() == right.ranks.tolist()
            for entries, expected in zip(got, right.candidates, strict=True):
                same_candidates &= [t for t, _ in entries] == [t for t, _ in expected]
                torch.testing.assert_close(
                    torch.tensor([p for _, p in entries]), torch.tensor([p for _, p in expected])
                )
        again = ready_to_sample(logits.to(DEVICE), plan, inputs, last, masks)
        is_same = tokens.tolist() == right.tokens
        rows.add(what, f"{1000 * seconds_on_device(again):.3f}", is_same, same_candidates)
        assert is_same, what
        assert same_candidates in (True, ""), what


def full_step(plan: StepPlan) -> StepPlan:
    """The plan of two prompts: every position scored, the last ones sampled under a mask."""
    ends = plan.query_start_loc[1:] - 1
    count, samples = len(plan.token_ids), len(ends)
    return replace(
        plan_of(
            plan.step_id,
            **{name: getattr(plan, name) for name in COMPUTED},
            logits_indices=np.arange(count),
            sample_logits=ends,
            sample_rows=plan.rows,
            repetition_penalty=np.full(samples, 1.5),
            num_candidates=np.full(samples, 5),
            history_start=3 * np.arange(samples + 1),
            history_tokens=[1, 2, 3] * samples,
            history_counts=[0, 1, 2] * samples,
            score_logits=np.arange(count),
            score_tokens=np.roll(plan.token_ids, -1),
            score_candidates=np.full(count, 2),
        ),
        awaits_mask=True,
    )


@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_with_a_late_mask_and_scores(graphs: bool, tmp_path: Path, table: NewTable) -> None:
    """Through the runner's lanes: buffers that grow, a mask copied while the forward runs, more
    logits than rows. Two steps in flight."""
    tiny_models.save(tiny_models.llama(), tmp_path)
    results: list[list[StepResult]] = []
    for device in ("cpu", str(DEVICE)):
        loaded = load(tmp_path, device=device, dtype="float32", page_size=16)
        process = InProcess(loaded, max_batch_tokens=128, use_cuda_graph=graphs, is_padded=graphs)
        plan = full_step(process.first_plan(range(1, 60), range(9, 30)))
        vocab_size = loaded.vocab_size
        mask = mask_message(plan.step_id, {0: range(0, vocab_size, 2)}, vocab_size)

        def mask_of(mask: link_pb2.Mask = mask) -> link_pb2.Mask:
            return mask

        launched = [process.runner.launch(plan, mask_of) for _ in range(2)]
        results.append([step.wait() for step in launched])
    rows = table(
        f"Masked, scored steps through the runner, {'graphs' if graphs else 'eager'}",
        ["step", "same tokens", "same candidates"],
        "On the device, against the CPU.",
    )
    for index, (right, got) in enumerate(zip(*results, strict=True)):
        is_same = got.token_ids.tolist() == right.token_ids.tolist()
        same_candidates = got.candidate_ids.tolist() == right.candidate_ids.tolist()
        rows.add(index, is_same, same_candidates)
        assert is_same
        assert same_candidates
        np.testing.assert_allclose(got.logprobs, right.logprobs, atol=1e-4)
