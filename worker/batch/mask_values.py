"""Refuses grammar masks that do not fit their plan. numpy only."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from protos import link_pb2
from protos.plan import Int32, StepPlan
from worker.batch.plan_values import InvalidPlan

_WORD_BITS: Final = 32


def check_mask(
    mask: link_pb2.Mask, plan: StepPlan, vocab_size: int
) -> tuple[npt.NDArray[np.int64], Int32]:
    """The samples that have a mask, int64 [M], and which tokens each of them may have: int32
    [M, words], bit t % 32 of word t / 32 for token t, no bit beyond the vocabulary.

    Raises InvalidPlan.
    """
    count = len(plan.sample_rows)
    samples = np.fromiter(mask.sample_indices, np.int64)
    what = f"the mask of step {mask.step_id}"
    if mask.step_id != plan.step_id:
        raise InvalidPlan(f"{what} came for step {plan.step_id}")
    is_inside = len(samples) == 0 or (samples[0] >= 0 and samples[-1] < count)
    if not is_inside or np.any(np.diff(samples) <= 0):
        raise InvalidPlan(
            f"{what} names the samples {samples.tolist()}; they must rise within 0..{count - 1}"
        )
    if len(mask.words) != len(samples):
        raise InvalidPlan(f"{what} has {len(mask.words)} rows of words for {len(samples)} samples")
    words = np.zeros((len(samples), -(-vocab_size // _WORD_BITS)), np.int32)
    for place, (sample, given) in enumerate(zip(samples.tolist(), mask.words, strict=True)):
        if len(given) % 4:
            raise InvalidPlan(
                f"{what} has {len(given)} bytes for sample {sample}; allowed: a multiple of 4"
            )
        row = np.frombuffer(given, "<i4")[: words.shape[1]]
        words[place, : len(row)] = row
    if vocab_size % _WORD_BITS:
        words[:, -1] &= (1 << vocab_size % _WORD_BITS) - 1
    empty = samples[~words.any(axis=1)].tolist()
    if empty:
        raise InvalidPlan(f"{what} allows samples {empty} none of the {vocab_size} tokens")
    return samples, words
