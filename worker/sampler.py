"""Chooses a token per row of logits: temperature → top_k → top_p → min_p → one uniform number.

The kept tokens are those that transformers' warpers keep in the same order, ties with the last of
top_k included (which of several equal logits top_p keeps, transformers leaves to chance). A row's
token depends on its own logits, settings and uniform number only, never on its neighbours: every
operation here works row by row, in an order that the row alone fixes. (Hence sums are cumulative
sums: torch splits a plain sum over threads by the shape of the batch.)

Owns: the choice. Does not own: where `u` comes from (the scheduler's hash of seed and position),
penalties and bias, which change the logits before.

The price: sorting a row of 49,152 logits costs some 5 ms on a CPU core, so there a row is first
tried with its 256 largest logits, then with 4,096, and sorted whole only if that is not enough.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NumpyFloat = npt.NDArray[np.float32]
NumpyInt = npt.NDArray[np.int32]

CANDIDATES: Final = (256, 4096)  # tried in this order, on the CPU
# Candidates looked at in one go: sorting takes some 50 bytes for each (step_memory.py counts them).
MOST_AT_ONCE: Final = 2**22
# Below this a row is greedy but for exact ties, and logits / temperature would overflow.
MIN_TEMPERATURE: Final = 1e-5


def sample(
    logits: Tensor,
    temperature: NumpyFloat,
    top_k: NumpyInt,
    top_p: NumpyFloat,
    min_p: NumpyFloat,
    u: NumpyFloat,
) -> Tensor:
    """Token ids, int64 [S] on the device of `logits` (float32 [S, V], not changed).

    The other arguments are arrays [S]: temperature 0 = greedy (the lowest id among equals),
    top_k 0 = off, top_p 1 = off, min_p 0 = off, u in [0, 1). A row whose logits are not finite
    gets some valid token id.
    """
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    greedy = temperature <= 0
    truncated = ~greedy & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (min_p > 0))

    rows = np.flatnonzero(greedy)
    if len(rows):
        tokens[rows] = _take(logits, rows).argmax(dim=-1)
    rows = np.flatnonzero(~greedy & ~truncated)
    if len(rows):
        probs = _scaled(logits, rows, temperature).softmax(dim=-1)
        tokens[rows] = _draw_from_all(probs, _column(u, rows, logits))
    rows = np.flatnonzero(truncated)
    if len(rows):
        scaled = _scaled(logits, rows, temperature)
        settings = [_column(array, rows, logits) for array in (top_k, top_p, min_p, u)]
        tokens[rows] = _draw_from_kept(scaled, *settings)
    return tokens


def _take(logits: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
    """`logits[rows]`, without a copy when that is all of them."""
    return logits if len(rows) == len(logits) else logits[torch.from_numpy(rows).to(logits.device)]


def _scaled(logits: Tensor, rows: npt.NDArray[np.int64], temperature: NumpyFloat) -> Tensor:
    divisor = torch.from_numpy(np.maximum(temperature[rows], np.float32(MIN_TEMPERATURE)))
    return _take(logits, rows) / divisor.to(logits.device)[:, None]


def _column(array: NumpyFloat | NumpyInt, rows: npt.NDArray[np.int64], logits: Tensor) -> Tensor:
    """float64 [R, 1]: exact for what it is used for, and wide enough for sums of V numbers."""
    return torch.from_numpy(array[rows].astype(np.float64)).to(logits.device)[:, None]


def _draw_from_all(probs: Tensor, u: Tensor) -> Tensor:
    """The first token at which the cumulative probability exceeds u. [R, V], [R, 1] → [R]."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    chosen = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
    # u < 1 never leads past the end; logits that are not finite may
    return chosen[:, 0].clamp_(max=probs.shape[-1] - 1)


def _draw_from_kept(
    scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor
) -> Tensor:
    """As _draw_from_all, over what the three filters keep, most probable first. → [R].

    Changes rows of `scaled` that are not finite.
    """
    num_rows, vocab_size = scaled.shape
    probs = scaled.softmax(dim=-1)
    scaled.masked_fill_(probs[:, :1].isnan(), 0.0)  # NaN has no place in an order
    sizes = [size for size in CANDIDATES if size < vocab_size and scaled.device.type == "cpu"]
    tokens = torch.zeros(num_rows, dtype=torch.int64, device=scaled.device)
    left = torch.arange(num_rows, device=scaled.device)  # rows without a token yet
    for size in (*sizes, vocab_size):
        undecided = []
        for rows in left.split(max(1, MOST_AT_ONCE // size)):
            ids = _largest(scaled, rows, size)
            at = (rows[:, None], ids)
            chosen, is_enough = _draw(
                scaled[at], probs[at], vocab_size, top_k[rows], top_p[rows], min_p[rows], u[rows]
            )
            tokens[rows] = ids.gather(1, chosen[:, None])[:, 0]
            undecided.append(rows[~is_enough])
        left = torch.cat(undecided)
        if not len(left):
            break
    return tokens


def _largest(scaled: Tensor, rows: Tensor, size: int) -> Tensor:
    """Ids of the `size` largest of each of `rows`, falling, the lower id first among equals.

    int64 [len(rows), size]
    """
    if size == scaled.shape[1]:
        return torch.sort(scaled[rows], dim=-1, descending=True, stable=True).indices
    # numpy finds the size-th largest five times faster than torch.topk finds the ids
    values = scaled.numpy()
    ids = np.empty((len(rows), size), np.int64)
    for index, row in enumerate(rows.tolist()):
        bound = np.partition(values[row], -size)[-size]
        found = np.flatnonzero(values[row] >= bound)  # more than size if several equal the bound
        ids[index] = found[np.argsort(-values[row, found], kind="stable")[:size]]
    return torch.from_numpy(ids)


def _draw(
    values: Tensor,
    probs: Tensor,
    vocab_size: int,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    u: Tensor,
) -> tuple[Tensor, Tensor]:
    """Index among the candidates [R], and whether the candidates were enough to know it [R].

    `values` and `probs` [R, C] are the C largest of each row in falling order, so that what a
    filter keeps is always a prefix.
    """
    num_candidates = values.shape[1]
    is_whole = num_candidates == vocab_size
    probs = probs.double()
    cumulative = probs.cumsum(dim=-1)

    has_top_k = (top_k > 0) & (top_k < vocab_size)
    last = top_k.clamp(1, num_candidates).long() - 1
    in_top_k = ~has_top_k | (values >= values.gather(1, last))  # ties with the last one stay in
    num_in_top_k = in_top_k.sum(dim=-1, keepdim=True)
    mass = torch.where(has_top_k, cumulative.gather(1, num_in_top_k.clamp(min=1) - 1), 1.0)

    in_top_p = (top_p >= 1) | (cumulative - probs < top_p * mass)
    in_min_p = probs >= min_p * probs[:, :1]
    keep = in_top_k & in_top_p & in_min_p
    num_kept = keep.sum(dim=-1, keepdim=True).clamp(min=1)

    # past the last candidate there may be more to keep, or another tie that top_k keeps
    is_enough = is_whole | torch.where(has_top_k, num_in_top_k, num_kept).lt(num_candidates)
    target = u * cumulative.gather(1, num_kept - 1)
    return (cumulative <= target).sum(dim=-1), is_enough[:, 0]
