"""Changes the logits of those samples that ask for it: biases, penalties, grammar masks, bans.

In this order, as vLLM applies them: logit_bias → repetition penalty (as transformers, over prompt
and output) → frequency and presence penalties (over the output) → mask → bans. Bans come last
because what they banned must come back where nothing else is left; as -inf stays -inf under all
that lies between, the result is the same as if they came first.

Biases, penalties and bans touch single logits, never whole rows, and nothing of other samples. A
sample's logits depend on its own entries only: where several entries meet in one logit, they either
write the same number or add numbers whose order does not matter. On CUDA nothing here waits for the
device.

Owns: this arithmetic. Does not own: which entries a sample has (the plan's, sample_inputs.py), what
is sampled from the result (sampler.py).
"""

from __future__ import annotations

import math
from typing import Final, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from worker.step.sampler import MOST_AT_ONCE, SampleRows

Array = TypeVar("Array")

# Larger sums and products are cut: divided by the lowest temperature they must stay finite, or
# tokens that a grammar forbids would be as probable as those that it allows.
MOST_CHANGED: Final = 1e30
_WORD_BITS: Final = 32


class Edits(NamedTuple, Generic[Array]):
    """What changes, as arrays of the host or of the device. `rows` are samples: rows of logits.

    Of several entries with one row and one token, all biases count; history has none such.
    """

    beams: Array  # int64 rows whose logits become log probabilities first

    bias_rows: Array  # int64 [A], finite biases
    bias_tokens: Array  # int64
    bias_after: Array  # int64 only if the row sampled this token last; or ANY_TOKEN
    bias: Array  # float32

    history_rows: Array  # int64 [H]
    history_tokens: Array  # int64 or UNKNOWN_TOKEN, once per row
    history_counts: Array  # float32 how often it was generated; 1 for UNKNOWN_TOKEN

    banned: Array  # int64 [B] rows with bans
    ban_places: Array  # int64 [N] into `banned`
    ban_tokens: Array  # int64
    ban_after: Array  # int64


class RowMasks(NamedTuple, Generic[Array]):
    """Which tokens a grammar allows in some rows."""

    rows: Array  # int64 [M]
    words: Array  # int32 [M, words]; bit t % 32 of word t / 32 = token t is allowed


def edit_logits(
    logits: Tensor,
    samples: SampleRows,
    edits: Edits[Tensor] | None,
    masks: RowMasks[Tensor] | None,
    last_token: Tensor,
) -> None:
    """Changes `logits` (float32 [S, V]) in place. `last_token` int64 [.] is the token that each row
    of `samples.rows` sampled last."""
    if edits is not None:
        _begin_beams(logits, edits)
        last = last_token[samples.rows]
        _add_biases(logits, edits, last)
        _penalise(logits, edits, samples, last)
    if masks is not None:
        _apply_masks(logits, masks)
    if edits is not None:
        _ban(logits, edits, last)


def _begin_beams(logits: Tensor, edits: Edits[Tensor]) -> None:
    for rows in _slices(edits.beams, logits):
        logits[rows] = logits[rows].log_softmax(dim=-1)


def _add_biases(logits: Tensor, edits: Edits[Tensor], last: Tensor) -> None:
    if len(edits.bias):
        applies = _applies(edits.bias_after, last[edits.bias_rows])
        values = edits.bias.clamp(-MOST_CHANGED, MOST_CHANGED) * applies
        logits.index_put_((edits.bias_rows, edits.bias_tokens), values, accumulate=True)


def _penalise(logits: Tensor, edits: Edits[Tensor], samples: SampleRows, last: Tensor) -> None:
    rows = edits.history_rows
    if not len(rows):
        return
    sampled_last, known = last[rows], edits.history_tokens
    is_unknown = known < 0
    tokens = torch.where(is_unknown, sampled_last, known)
    # The unknown token may be one of the known ones: then both entries have the sum of their
    # counts. Elsewhere they would write different numbers to the same place.
    is_twin = ~is_unknown & (tokens == sampled_last)
    zeros = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
    of_unknown = zeros.index_put((rows,), edits.history_counts * is_unknown, accumulate=True)
    of_twin = zeros.index_put((rows,), edits.history_counts * is_twin, accumulate=True)
    counts = edits.history_counts + is_twin * of_unknown[rows] + is_unknown * of_twin[rows]

    before = logits[rows, tokens]
    repetition = samples.parameters["repetition_penalty"][rows]
    values = torch.where(before < 0, before * repetition, before / repetition)
    values = values - samples.parameters["frequency_penalty"][rows] * counts
    values = values - samples.parameters["presence_penalty"][rows] * (counts > 0)
    values = torch.where(before.isinf(), before, values.clamp(-MOST_CHANGED, MOST_CHANGED))
    logits.index_put_((rows, tokens), values)


def _apply_masks(logits: Tensor, masks: RowMasks[Tensor]) -> None:
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=logits.device)
    for part in _slices(torch.arange(len(masks.rows), device=logits.device), logits):
        rows = masks.rows[part]
        bits = (masks.words[part][:, :, None] >> shifts) & 1
        is_allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
        # an allowed token stays possible even if the model's logit is -inf: it may be the only one
        allowed = logits[rows].clamp_(min=-MOST_CHANGED)
        logits[rows] = torch.where(is_allowed, allowed, -math.inf)


def _ban(logits: Tensor, edits: Edits[Tensor], last: Tensor) -> None:
    if not len(edits.ban_tokens):
        return
    rows, tokens = edits.banned[edits.ban_places], edits.ban_tokens
    before = logits[rows, tokens]
    applies = _applies(edits.ban_after, last[rows])
    bans = torch.where(applies, -math.inf, 0.0)
    logits.index_put_((rows, tokens), bans, accumulate=True)
    largest = [logits[part].amax(dim=-1) for part in _slices(edits.banned, logits)]
    nothing_left = (torch.cat(largest) == -math.inf)[edits.ban_places]
    values = torch.where(nothing_left, before, logits[rows, tokens])
    logits.index_put_((rows, tokens), values)


def _applies(after: Tensor, last: Tensor) -> Tensor:
    return (after < 0) | (after == last)


def _slices(rows: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    """Parts of `rows` whose logits may be copied at once."""
    if not len(rows):
        return ()
    return rows.split(max(1, MOST_AT_ONCE // logits.shape[1]))
