"""From a step's logits to tokens and log probabilities.

Scores first, of the logits as they are; then, slice by slice: edits, the choice of tokens, and the
candidates that are asked for. Logits are changed in place; what still needs them unchanged keeps a
copy of its rows.

Owns: this order, and which row's last token is which. Does not own: each of the parts
(logits_edits.py, sampler.py, candidates.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protos.plan import Int32
from worker.step.candidates import Answers, beam_candidates, token_logprobs
from worker.step.logits_edits import RowMasks, edit_logits
from worker.step.sample_inputs import SampleSlice, StepSamples
from worker.step.sampler import SampleRows

Sample = Callable[[Tensor, SampleRows], Tensor]  # see sampler.sample


class SampleMasks:
    """Grammar masks of a step's samples on the host, shared out over its slices."""

    def __init__(
        self, samples: npt.NDArray[np.int64], words: Int32, ranges: Sequence[tuple[int, int]]
    ) -> None:
        """`samples` int64 [M] rising, `words` [M, words]; `ranges` where slices begin and end."""
        self._counts: list[int] = []
        self.arrays: list[npt.NDArray[np.int64] | Int32] = []
        for begin, end in ranges:
            first, last = np.searchsorted(samples, (begin, end)).tolist()
            self._counts.append(last - first)
            self.arrays += [samples[first:last] - begin, words[first:last]]

    def on_device(self, tensors: Sequence[Tensor]) -> list[RowMasks[Tensor] | None]:
        """For each slice; `tensors` are `arrays` on the device."""
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return [
            RowMasks(*pair) if count else None
            for count, pair in zip(self._counts, pairs, strict=True)
        ]


def sample_step(
    logits: Tensor,
    step: StepSamples,
    masks: Sequence[RowMasks[Tensor] | None],
    last_token: Tensor,
    sample: Sample,
) -> tuple[Tensor, list[Answers]]:
    """Tokens int64 [S] of a step with `logits` [L, V], which may be changed, and the answers in the
    order of SampleInputs.answer_order. `last_token` int64 [rows] gets each row's last token, to
    which later plans refer by -1. `masks`: one entry per slice, or none."""
    answers: list[Answers] = []
    if step.scores is not None and step.score_tokens is not None:
        answers += token_logprobs(logits, step.scores, step.score_tokens)
    tokens: list[Tensor] = []
    for index, part in enumerate(step.slices):
        of_part = masks[index] if masks else None
        tokens.append(_sample_slice(logits, part, of_part, last_token, sample, answers))
    if not tokens:
        return step.rows, answers
    chosen = tokens[0] if len(tokens) == 1 else torch.cat(tokens)
    if step.last is None:
        last_token[step.rows] = chosen
    else:
        last_token[step.rows[step.last]] = chosen[step.last]
    return chosen, answers


def _sample_slice(
    logits: Tensor,
    part: SampleSlice,
    masks: RowMasks[Tensor] | None,
    last_token: Tensor,
    sample: Sample,
    answers: list[Answers],
) -> Tensor:
    # usually one sample of each row in order: then the rows need not be copied
    rows = logits[part.begin : part.end] if part.is_in_order else logits[part.samples.logits]
    own = rows.float()
    unchanged = None
    if part.kept is not None:
        unchanged = own[part.kept]
    if part.edits is not None or masks is not None:
        edit_logits(own, part.samples, part.edits, masks, last_token)
    tokens = sample(own, part.samples)
    if part.beams is not None:
        answers += beam_candidates(own, part.beams)
    if unchanged is not None:
        own[part.kept] = unchanged
    if part.raw is not None:
        answers += token_logprobs(own, part.raw, tokens[part.raw.rows])
    return tokens
