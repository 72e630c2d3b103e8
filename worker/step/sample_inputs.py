"""What the samples and scores of a plan need on the device, beside what is fixed in length.

Derived on the host, so that the device never has to be asked how many samples want what. Samples
are treated in slices, which bounds the memory of what is computed for each; most steps have one.

Owns: which sample gets which entries, in which order answers are computed. Does not own: what is
done with them (logits_edits.py, candidates.py, sampling.py), how they get to the device
(ragged_buffer.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from protos.plan import Int32, StepPlan
from worker.step.candidates import AnswerOrder, Asked
from worker.step.logits_edits import Edits
from worker.step.sampler import SampleRows, split_rows

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SampleSlice:
    """Samples begin..end-1 on the device; all indices count from `begin`."""

    begin: int
    end: int
    is_in_order: bool  # sample i is of logits row i
    samples: SampleRows
    edits: Edits[Tensor] | None
    beams: Asked | None
    raw: Asked | None  # samples whose answers are of the unchanged logits
    kept: Tensor | None  # int64 those of `raw` whose logits may be changed


@dataclass(frozen=True, slots=True, eq=False)
class StepSamples:
    """All that is sampled and scored in a step, on the device."""

    slices: tuple[SampleSlice, ...]
    rows: Tensor  # int64 [S]
    last: Tensor | None  # int64 the last sample of each row; None = every sample is one
    scores: Asked | None
    score_tokens: Tensor | None  # int64 [Q] in the order of `scores`


@dataclass(frozen=True, slots=True, eq=False)
class _AskedPlaces:
    rows: int  # place among `arrays`
    groups: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Slice:
    begin: int
    end: int
    is_in_order: bool
    num_each: list[int]
    edits: Edits[int] | None
    beams: _AskedPlaces | None
    raw: _AskedPlaces | None
    kept: int | None


@dataclass(slots=True, eq=False)
class SampleInputs:
    """The host's side: arrays to be brought to the device, and where each belongs."""

    arrays: list[npt.NDArray[Any]] = field(default_factory=list)
    sample_order: list[Int64] = field(default_factory=list)  # of each slice: see SampleRows
    num_answers: int = 0
    num_entries: int = 0
    _slices: list[_Slice] = field(default_factory=list)
    _last: int | None = None
    _scores: _AskedPlaces | None = None
    _score_tokens: int | None = None
    _items: list[Int64] = field(default_factory=list)
    _lengths: list[Int64] = field(default_factory=list)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Where the slices begin and end."""
        return [(part.begin, part.end) for part in self._slices]

    @property
    def answer_order(self) -> AnswerOrder:
        return AnswerOrder(_joined(self._items), _joined(self._lengths))

    def on_device(self, tensors: Sequence[Tensor], fixed: SampleRows) -> StepSamples:
        """`tensors` are `arrays` on the device, `fixed` the arrays of all samples, with
        all of `sample_order` in the place of `plain`."""
        return StepSamples(
            slices=tuple(_slice_on_device(part, tensors, fixed) for part in self._slices),
            rows=fixed.rows,
            last=None if self._last is None else tensors[self._last],
            scores=_asked(self._scores, tensors),
            score_tokens=None if self._score_tokens is None else tensors[self._score_tokens],
        )

    # While it is built

    def _place(self, array: npt.NDArray[Any], dtype: type[np.generic] = np.int64) -> int:
        self.arrays.append(array.astype(dtype, copy=False))
        return len(self.arrays) - 1

    def _ask(self, items: Int64, rows: Int64, ks: Int32) -> tuple[_AskedPlaces, Int64]:
        """Also returns the order in which the rows are answered."""
        order = np.argsort(ks, kind="stable")
        self._items.append(items[order])
        lengths = ks[order].astype(np.int64) + 1
        self._lengths.append(lengths)
        self.num_answers += len(items)
        self.num_entries += int(lengths.sum())
        values, counts = np.unique(ks, return_counts=True)
        groups = tuple(zip(values.tolist(), counts.tolist(), strict=True))
        return _AskedPlaces(self._place(rows[order]), groups), order


def _joined(parts: list[Int64]) -> Int64:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _asked(places: _AskedPlaces | None, tensors: Sequence[Tensor]) -> Asked | None:
    return None if places is None else Asked(tensors[places.rows], places.groups)


def _slice_on_device(part: _Slice, tensors: Sequence[Tensor], fixed: SampleRows) -> SampleSlice:
    if part.end - part.begin < len(fixed.rows):
        fixed = _cut(fixed, slice(part.begin, part.end))
    greedy, plain, truncated = fixed.plain.split(part.num_each)
    return SampleSlice(
        begin=part.begin,
        end=part.end,
        is_in_order=part.is_in_order,
        samples=replace(fixed, greedy=greedy, plain=plain, truncated=truncated),
        edits=None if part.edits is None else Edits(*(tensors[place] for place in part.edits)),
        beams=_asked(part.beams, tensors),
        raw=_asked(part.raw, tensors),
        kept=None if part.kept is None else tensors[part.kept],
    )


def _cut(fixed: SampleRows, here: slice) -> SampleRows:
    return replace(
        fixed,
        logits=fixed.logits[here],
        rows=fixed.rows[here],
        plain=fixed.plain[here],
        u=fixed.u[here],
        parameters={name: tensor[here] for name, tensor in fixed.parameters.items()},
    )


def prepare_samples(plan: StepPlan, vocab_size: int, most_at_once: int) -> SampleInputs:
    """Inputs of a plan that `check_plan` let pass, in slices of `most_at_once` samples."""
    inputs, count = SampleInputs(), len(plan.sample_rows)
    num_asked = int(np.count_nonzero(plan.num_candidates >= 0))
    if len(plan.score_tokens):
        numbers = num_asked + np.arange(len(plan.score_tokens))
        rows = plan.score_logits.astype(np.int64)
        inputs._scores, order = inputs._ask(numbers, rows, plan.score_candidates)
        inputs._score_tokens = inputs._place(plan.score_tokens[order])
    is_same = plan.sample_rows[1:] == plan.sample_rows[:-1]  # as the row of the sample before
    if is_same.any():
        inputs._last = inputs._place(np.flatnonzero(np.append(~is_same, True)))
    for begin in range(0, count, most_at_once):
        end = min(begin + most_at_once, count)
        _add_slice(inputs, plan, vocab_size, begin, end)
    return inputs


def _add_slice(inputs: SampleInputs, plan: StepPlan, vocab_size: int, begin: int, end: int) -> None:
    here = slice(begin, end)
    kinds = split_rows({name: array[here] for name, array in plan.sampling.items()}, vocab_size)
    inputs.sample_order += kinds
    is_beam = plan.is_beam[here] == 1
    is_changed = is_beam
    if len(plan.history_tokens) or len(plan.bias):
        starts = plan.history_start[begin : end + 1] + plan.bias_start[begin : end + 1]
        is_changed = is_beam | (np.diff(starts) > 0)
    edits = _place_edits(inputs, plan, vocab_size, here, is_beam) if is_changed.any() else None
    is_asked = plan.num_candidates[here] >= 0
    beams, raw, kept = None, None, None
    if is_asked.any():
        items = np.count_nonzero(plan.num_candidates[:begin] >= 0) + np.cumsum(is_asked) - 1
        ks, is_raw = plan.num_candidates[here], is_asked & ~is_beam
        beams = _ask_samples(inputs, is_asked & is_beam, items, ks)
        raw = _ask_samples(inputs, is_raw, items, ks)
        is_kept = is_raw & (is_changed | plan.awaits_mask)
        kept = inputs._place(np.flatnonzero(is_kept)) if is_kept.any() else None
    inputs._slices.append(
        _Slice(
            begin=begin,
            end=end,
            is_in_order=np.array_equal(plan.sample_logits[here], np.arange(begin, end)),
            num_each=[len(rows) for rows in kinds],
            edits=edits,
            beams=beams,
            raw=raw,
            kept=kept,
        )
    )


def _ask_samples(
    inputs: SampleInputs, which: npt.NDArray[np.bool_], items: Int64, ks: Int32
) -> _AskedPlaces | None:
    rows = np.flatnonzero(which)
    return inputs._ask(items[rows], rows, ks[rows])[0] if len(rows) else None


def _place_edits(
    inputs: SampleInputs,
    plan: StepPlan,
    vocab_size: int,
    here: slice,
    is_beam: npt.NDArray[np.bool_],
) -> Edits[int]:
    rows, entries = _entries(plan.history_start, here)
    tokens = plan.history_tokens[entries]
    counts = np.where(tokens < 0, 1, plan.history_counts[entries])
    exists = tokens < vocab_size  # a tokenizer may know ids that no logits belong to
    bias_rows, bias_entries = _entries(plan.bias_start, here)
    bias, after = plan.bias[bias_entries], plan.bias_after[bias_entries]
    bias_tokens = plan.bias_tokens[bias_entries]
    is_ban = (bias == -math.inf) & (bias_tokens < vocab_size)
    is_finite = (bias != -math.inf) & (bias_tokens < vocab_size)
    banned, ban_places = np.unique(bias_rows[is_ban], return_inverse=True)
    return Edits(
        beams=inputs._place(np.flatnonzero(is_beam)),
        bias_rows=inputs._place(bias_rows[is_finite]),
        bias_tokens=inputs._place(bias_tokens[is_finite]),
        bias_after=inputs._place(after[is_finite]),
        bias=inputs._place(bias[is_finite], np.float32),
        history_rows=inputs._place(rows[exists]),
        history_tokens=inputs._place(tokens[exists]),
        history_counts=inputs._place(counts[exists], np.float32),
        banned=inputs._place(banned),
        ban_places=inputs._place(ban_places),
        ban_tokens=inputs._place(bias_tokens[is_ban]),
        ban_after=inputs._place(after[is_ban]),
    )


def _entries(start: Int32, here: slice) -> tuple[Int64, slice]:
    """The sample of each entry, from the slice's first on, and where these entries are."""
    starts = start[here.start : here.stop + 1]
    rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return rows, slice(int(starts[0]), int(starts[-1]))
