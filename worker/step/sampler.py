"""Chooses a token per row of logits: temperature → top_k → top_p → min_p → one uniform number.

The kept tokens are those that transformers' warpers keep in the same order, ties with the last of
top_k included (which of several equal logits top_p keeps, transformers leaves to chance). A row's
token depends on its own logits, settings and uniform number only, never on its neighbours: every
operation here works row by row, in an order that the row alone fixes. (Hence sums are cumulative
sums: torch splits a plain sum over threads by the shape of the batch.)

Owns: the choice. Does not own: where `u` comes from (the scheduler's hash of seed and position);
penalties, biases and masks, which change the logits before (logits_edits.py).

The price: sorting a row of 49,152 logits costs some 5 ms on a CPU core, so there a row is first
tried with its 256 largest logits, then with 4,096, and sorted whole only if that is not enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protos.plan import Arrays
from worker.step.largest import largest

NumpyIndices = npt.NDArray[np.int64]

CANDIDATES: Final = (256, 4096)  # tried in this order, on the CPU
# Candidates looked at in one go: sorting takes some 50 bytes for each (step_memory.py counts them).
MOST_AT_ONCE: Final = 2**22
ARGMAX_PART: Final = 256  # ids; measured
# Below this a row is greedy but for exact ties, and logits / temperature would overflow.
MIN_TEMPERATURE: Final = 1e-5
_WITHOUT_FLOAT64: Final = ("mps",)  # kinds of devices; the CPU samples for them


@dataclass(frozen=True, slots=True, eq=False)
class SampleRows:
    """S samples, on the device of the logits. The host knows how many are of each kind, so that
    nothing here has to wait for the device."""

    logits: Tensor  # int64 [S] the row of logits that each is sampled from
    rows: Tensor  # int64 [S] whose token it is
    greedy: Tensor  # int64 [.] these three share out 0..S-1
    plain: Tensor  # sampled from all tokens
    truncated: Tensor  # sampled from what top_k, top_p or min_p keep
    u: Tensor  # float32 [S] in [0, 1)
    parameters: Mapping[str, Tensor]  # [S] for each of protos.sampling.SAMPLER_FIELDS


def split_rows(
    parameters: Arrays, vocab_size: int
) -> tuple[NumpyIndices, NumpyIndices, NumpyIndices]:
    """Which samples are greedy, plain and truncated; `parameters` as in SampleRows."""
    greedy, top_k = parameters["temperature"] <= 0, parameters["top_k"]
    truncated = ((top_k > 0) & (top_k < vocab_size)) | (parameters["top_p"] < 1)
    truncated = ~greedy & (truncated | (parameters["min_p"] > 0))
    return np.flatnonzero(greedy), np.flatnonzero(~greedy & ~truncated), np.flatnonzero(truncated)


def sample(logits: Tensor, samples: SampleRows) -> Tensor:
    """Token ids, int64 [S] on the device of `logits` (float32 [S, V], not changed), row by row of
    `samples`. A row whose logits are not finite gets some valid token id. On CUDA nothing here
    waits for the device.
    """
    if len(samples.greedy) == len(logits):
        return argmax(logits)
    if logits.device.type in _WITHOUT_FLOAT64:
        there = {field.name: getattr(samples, field.name) for field in fields(samples)}
        parameters = {name: tensor.cpu() for name, tensor in there.pop("parameters").items()}
        there = {name: tensor.cpu() for name, tensor in there.items()}
        return sample(logits.cpu(), SampleRows(**there, parameters=parameters)).to(logits.device)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(samples.greedy):
        tokens[samples.greedy] = argmax(logits[samples.greedy])
    if len(samples.plain):
        probs = _scaled(logits, samples.plain, samples.parameters["temperature"]).softmax(dim=-1)
        tokens[samples.plain] = _draw_from_all(probs, _column(samples.u, samples.plain))
    if len(samples.truncated):
        rows = samples.truncated
        scaled = _scaled(logits, rows, samples.parameters["temperature"])
        filters = (samples.parameters[name] for name in ("top_k", "top_p", "min_p"))
        settings = (_column(tensor, rows) for tensor in (*filters, samples.u))
        tokens[rows] = _draw_from_kept(scaled, *settings)
    return tokens


def argmax(logits: Tensor) -> Tensor:
    """[S, V] -> [S], the lowest id among equals.

    On a CPU torch finds the largest number ten times as fast as its place, so the place is looked
    for in a small part.
    """
    vocab_size = logits.shape[1]
    if logits.device.type != "cpu" or vocab_size < 2 * ARGMAX_PART:
        return logits.argmax(dim=-1)
    end = vocab_size - vocab_size % ARGMAX_PART
    tops = [logits[:, :end].unflatten(1, (-1, ARGMAX_PART)).amax(dim=2)]
    if end < vocab_size:
        tops.append(logits[:, end:].amax(dim=1, keepdim=True))
    # the last part begins earlier if need be: what it then holds of others is smaller, or they
    # would have been first
    begin = (torch.cat(tops, dim=1).argmax(dim=1) * ARGMAX_PART).clamp_(
        max=vocab_size - ARGMAX_PART
    )
    within = logits.gather(1, begin[:, None] + torch.arange(ARGMAX_PART))
    return begin + within.argmax(dim=1)


def _scaled(logits: Tensor, rows: Tensor, temperature: Tensor) -> Tensor:
    # indexing copies, so dividing in place changes nobody's logits
    return logits[rows].div_(temperature[rows].clamp(min=MIN_TEMPERATURE)[:, None])


def _column(tensor: Tensor, rows: Tensor) -> Tensor:
    """float64 [R, 1]: exact for what it is used for, and wide enough for sums of V numbers."""
    return tensor[rows].double()[:, None]


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
            ids = largest(scaled, size, rows)
            at = (rows[:, None], ids)
            chosen, is_enough = _draw(
                scaled[at], probs[at], vocab_size, top_k[rows], top_p[rows], min_p[rows], u[rows]
            )
            tokens[rows] = ids.gather(1, chosen[:, None])[:, 0]
            if size < vocab_size:  # else all are decided, and asking would wait for the device
                undecided.append(rows[~is_enough])
        left = torch.cat(undecided) if undecided else left[:0]
        if not len(left):
            break
    return tokens


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
