"""Log probabilities: of a chosen or given token, its rank, and the k most probable tokens.

The log probabilities are those of `log_softmax` in float32, and order and rank follow them. Rows
are treated in slices, so that memory is bounded, and one by one: nothing depends on neighbours. On
CUDA nothing here waits for the device.

Owns: this arithmetic, and the order in which answers lie in memory. Does not own: which rows are
asked for (sample_inputs.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protos.plan import Int32
from worker.step.largest import largest
from worker.step.sampler import MOST_AT_ONCE

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Answers of one kind, those with the same k together."""

    rows: Tensor  # int64 [N] of the logits
    groups: tuple[tuple[int, int], ...]  # k, and number of rows that ask for k candidates


class Answers(NamedTuple):
    """Of N rows: a row has 1 + k entries, its own token first."""

    ranks: Tensor  # int64 [N]
    ids: Tensor  # int64 [E]
    logprobs: Tensor  # float32 [E]


def token_logprobs(logits: Tensor, asked: Asked, own: Tensor) -> Iterator[Answers]:
    """Answers for `asked` rows of `logits` [., V], whose own tokens are `own` int64 [N]. A token
    beyond the vocabulary has probability 0."""
    vocab_size = logits.shape[1]
    for rows, place, k in _slices(asked, vocab_size):
        logprobs = logits[rows].float().log_softmax(dim=-1)
        tokens = own[place]
        exists = tokens < vocab_size
        values = logprobs.gather(1, tokens.clamp(max=vocab_size - 1)[:, None])
        values = torch.where(exists[:, None], values, -math.inf)
        ranks = 1 + _num_greater(logprobs, values)
        yield _answers(ranks, tokens[:, None], values, logprobs, k)


def _num_greater(numbers: Tensor, than: Tensor) -> Tensor:
    """[R, V], [R, 1] → int64 [R]"""
    if numbers.device.type == "cpu":  # numpy counts four times as fast as torch sums
        return torch.from_numpy(np.count_nonzero(numbers.numpy() > than.numpy(), axis=1))
    return (numbers > than).sum(dim=-1)


def beam_candidates(logprobs: Tensor, asked: Asked) -> Iterator[Answers]:
    """Answers for `asked` rows of log probabilities [., V], whose own tokens are the best ones."""
    for rows, _, k in _slices(asked, logprobs.shape[1]):
        of_rows = logprobs[rows]
        best = largest(of_rows, 1)
        ranks = torch.ones_like(best[:, 0])
        yield _answers(ranks, best, of_rows.gather(1, best), of_rows, k)


def _slices(asked: Asked, vocab_size: int) -> Iterator[tuple[Tensor, slice, int]]:
    most, begin = max(1, MOST_AT_ONCE // vocab_size), 0
    for k, count in asked.groups:
        for first in range(begin, begin + count, most):
            place = slice(first, min(first + most, begin + count))
            yield asked.rows[place], place, k
        begin += count


def _answers(ranks: Tensor, own: Tensor, own_logprobs: Tensor, logprobs: Tensor, k: int) -> Answers:
    """own and own_logprobs [R, 1], logprobs [R, V]"""
    if k:
        best = largest(logprobs, k)
        own = torch.cat([own, best], dim=1)
        own_logprobs = torch.cat([own_logprobs, logprobs.gather(1, best)], dim=1)
    return Answers(ranks, own.flatten(), own_logprobs.flatten())


def joined(answers: Sequence[Answers]) -> tuple[Tensor, ...]:
    """The three arrays of all answers; none where there is no answer."""
    return tuple(torch.cat(parts) for parts in zip(*answers, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class AnswerOrder:
    """Where answers lie, and where a result wants them: by sample, then by score."""

    items: Int64  # [N] the place of each answer in the result
    num_entries: Int64  # [N] 1 + k

    def restore(self, ranks: Int32, ids: Int32, logprobs: Int32) -> tuple[Int32, Int32, Int32]:
        """The arrays as the result wants them, of the arrays as they lie."""
        order = np.argsort(self.items)
        lengths = self.num_entries[order]
        starts = (np.cumsum(self.num_entries) - self.num_entries)[order]
        shift = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        entries = shift + np.arange(len(shift))
        return ranks[order], ids[entries], logprobs[entries]
