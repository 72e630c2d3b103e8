"""A plan's samples and scores run on logits that a test makes, without a model."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from protos import link_pb2
from protos.plan import ANY_TOKEN, NO_CANDIDATES, UNKNOWN_TOKEN, StepPlan
from protos.sampling import SAMPLER_FIELDS
from tests.support.plan_builder import plan_of
from worker.batch.mask_values import check_mask
from worker.step import sampler
from worker.step.candidates import Answers, joined
from worker.step.sample_inputs import SampleInputs, prepare_samples
from worker.step.sampler import SampleRows
from worker.step.sampling import Sample, SampleMasks, sample_step


@dataclass
class Case:
    """One sample. `output` is what the row generated before it."""

    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    settings: Mapping[str, float] = field(default_factory=dict)  # of SAMPLER_FIELDS
    bias: Sequence[tuple[int, float]] = ()  # token, value
    bias_after: Sequence[tuple[int, int, float]] = ()  # token, after which one, value
    num_candidates: int = NO_CANDIDATES
    is_beam: bool = False
    u: float = 0.5
    run_ahead: bool = False  # the last output token is on the device only


def plan_of_cases(cases: Sequence[Case], **arrays: Any) -> StepPlan:
    """A plan whose sample i is case i, of row i and logits row i. It computes nothing."""
    names = {name for case in cases for name in case.settings}
    values: dict[str, Any] = {
        name: [case.settings.get(name, SAMPLER_FIELDS[name].neutral) for case in cases]
        for name in names - {"temperature"}
    }
    values["temperature"] = [case.settings.get("temperature", 0.0) for case in cases]
    histories = [_history(case) for case in cases]
    biases = [[(t, ANY_TOKEN, v) for t, v in c.bias] + list(c.bias_after) for c in cases]
    each = np.arange(len(cases))
    return plan_of(
        **{
            **values,
            "logits_indices": each,
            "sample_logits": each,
            "sample_rows": each,
            "u": [case.u for case in cases],
            "num_candidates": [case.num_candidates for case in cases],
            "is_beam": [case.is_beam for case in cases],
            "history_start": np.cumsum([0, *map(len, histories)]),
            "history_tokens": [token for history in histories for token in history],
            "history_counts": [n for history in histories for n in history.values()],
            "bias_start": np.cumsum([0, *map(len, biases)]),
            "bias_tokens": [entry[0] for bias in biases for entry in bias],
            "bias_after": [entry[1] for bias in biases for entry in bias],
            "bias": [entry[2] for bias in biases for entry in bias],
            **arrays,
        }
    )


def _history(case: Case) -> dict[int, int]:
    known = case.output[:-1] if case.run_ahead else case.output
    history = dict.fromkeys(case.prompt, 0) | dict(Counter(known))
    return history | {UNKNOWN_TOKEN: 1} if case.run_ahead else history


@dataclass
class Sampled:
    tokens: list[int]
    logits: torch.Tensor  # [S, V] that were sampled from
    ranks: npt.NDArray[np.int32]
    candidates: list[list[tuple[int, float]]]  # of each answer: token and log probability


def run_cases(
    logits: torch.Tensor,
    plan: StepPlan,
    *,
    last_tokens: Sequence[int] | None = None,
    masks: Mapping[int, Sequence[int]] | None = None,
    at_once: int = 1000,
    sample: Sample = sampler.sample,
) -> Sampled:
    """`logits` [L, V] are not changed. `last_tokens` by row; `masks`: sample → allowed tokens."""
    inputs = prepare_samples(plan, logits.shape[1], at_once)
    seen: list[torch.Tensor] = []

    def keep(edited: torch.Tensor, samples: SampleRows) -> torch.Tensor:
        seen.append(edited.clone())
        return sample(edited, samples)

    tokens, answers = sample_on(logits.clone(), plan, inputs, last_tokens, masks, keep)
    ranks, candidates = np.zeros(0, np.int32), []
    if answers:
        arrays = [part.numpy() for part in joined(answers)]
        ranks, ids, logprobs = inputs.answer_order.restore(*arrays)
        candidates = by_answer(plan, ids, logprobs)
    return Sampled(tokens.tolist(), torch.cat(seen) if seen else logits[:0], ranks, candidates)


def sample_on(
    logits: torch.Tensor,
    plan: StepPlan,
    inputs: SampleInputs,
    last_tokens: Sequence[int] | None = None,
    masks: Mapping[int, Sequence[int]] | None = None,
    sample: Sample = sampler.sample,
) -> tuple[torch.Tensor, list[Answers]]:
    """`sample_step` on the device of `logits`, which it may change; `inputs` are those of `plan`.
    Returns tokens and answers."""
    return ready_to_sample(logits, plan, inputs, last_tokens, masks, sample)()


def ready_to_sample(
    logits: torch.Tensor,
    plan: StepPlan,
    inputs: SampleInputs,
    last_tokens: Sequence[int] | None = None,
    masks: Mapping[int, Sequence[int]] | None = None,
    sample: Sample = sampler.sample,
) -> Callable[[], tuple[torch.Tensor, list[Answers]]]:
    """What `sample_on` calls, once everything is on the device; it may be called again."""
    device, vocab_size = logits.device, logits.shape[1]

    def there(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    order = there(np.concatenate([np.zeros(0, np.int64), *inputs.sample_order]))
    fixed = SampleRows(
        logits=there(plan.sample_logits).long(),
        rows=there(plan.sample_rows).long(),
        greedy=order,
        plain=order,
        truncated=order,
        u=there(plan.u),
        parameters={name: there(array) for name, array in plan.sampling.items()},
    )
    step = inputs.on_device([there(array) for array in inputs.arrays], fixed)
    last = np.zeros(1 + plan.sample_rows.max(initial=0), np.int64)
    if last_tokens is not None:
        last[:] = last_tokens
    on_device = []
    if masks is not None:
        message = mask_message(plan.step_id, masks, vocab_size)
        shared_out = SampleMasks(*check_mask(message, plan, vocab_size), inputs.ranges)
        on_device = shared_out.on_device([there(array) for array in shared_out.arrays])
    return partial(sample_step, logits, step, on_device, there(last), sample)


def by_answer(
    plan: StepPlan, ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]
) -> list[list[tuple[int, float]]]:
    """A result's entries, by sample that asks and then by score."""
    ks = [*plan.num_candidates[plan.num_candidates >= 0].tolist(), *plan.score_candidates.tolist()]
    pairs = list(zip(ids.tolist(), logprobs.tolist(), strict=True))
    assert len(pairs) == sum(ks) + len(ks)
    starts = np.cumsum([0, *(k + 1 for k in ks)])
    return [pairs[a:b] for a, b in itertools.pairwise(starts)]


def mask_message(
    step_id: int, masks: Mapping[int, Sequence[int]], vocab_size: int
) -> link_pb2.Mask:
    """`masks`: sample → allowed tokens."""
    words = []
    for allowed in masks.values():
        bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        bits[list(allowed)] = 1
        words.append(np.packbits(bits, bitorder="little").tobytes())
    return link_pb2.Mask(step_id=step_id, sample_indices=list(masks), words=words)
