"""The per-step state of running requests, as arrays indexed by row.

A row is a request's fixed place, here and in the worker's per-request tables, from admission until
no plan in flight names it. A decode step is then a few array operations, not a loop over requests.
Two cursors are never mixed: `computed` counts tokens *scheduled* (their KV is stored, or will be by
plans in flight), `known` those *returned*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from protos.plan import NO_CANDIDATES, Arrays, Int32
from protos.sampling import SAMPLER_FIELDS
from scheduler_svc.core.request import NO_ROW, Request
from scheduler_svc.core.seeds import streams

MAX_STOP_IDS: Final = 4  # per request in arrays; a request with more is asked itself
NO_TOKEN: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class SamplingColumns:
    """Sampling parameters of some rows. All [n]."""

    streams: npt.NDArray[np.uint64]  # of uniform numbers (seeds.py)
    parameters: Arrays  # by SAMPLER_FIELDS


_Gathered = TypeVar("_Gathered")


class _LastGather(Generic[_Gathered]):
    """Caches a gather over the last rows asked for, as decode steps repeat theirs. Read only."""

    def __init__(self, gather: Callable[[Int32], _Gathered]) -> None:
        self._gather = gather
        self._last: tuple[bytes, _Gathered] | None = None

    def __call__(self, rows: Int32) -> _Gathered:
        key = rows.tobytes()
        if self._last is None or self._last[0] != key:
            self._last = key, self._gather(rows)
        return self._last[1]

    def forget(self) -> None:
        """Drops the cached gather, as a row got a new tenant."""
        self._last = None


class Rows:
    """The arrays of N rows."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.computed = np.zeros(num_rows, np.int32)  # [N] tokens scheduled
        self.known = np.zeros(num_rows, np.int32)  # [N] len(token_ids)
        self.outstanding = np.zeros(num_rows, np.int32)  # [N] samples planned, not returned
        self.limit = np.zeros(num_rows, np.int32)  # [N] prompt + max_tokens
        # [N] tokens to compute in all: the last sample needs no KV; 0 for a row that awaits its
        # fork or has ended
        self.goal = np.zeros(num_rows, np.int32)
        self.num_drafts = np.zeros(num_rows, np.int32)  # [N] draft tokens to verify, or in flight
        self.awaits_drafts = np.zeros(num_rows, np.bool_)  # [N] to be drafted once all is known
        self.last_token = np.zeros(num_rows, np.int32)  # [N] token_ids[-1]
        self.is_decoding = np.zeros(num_rows, np.bool_)  # [N] all known tokens are scheduled
        self.is_finished = np.zeros(num_rows, np.bool_)  # [N] ended, but a plan names the row
        self.awaits_fork = np.zeros(num_rows, np.bool_)  # [N] a sibling not forked off yet
        self.will_fork = np.zeros(num_rows, np.bool_)  # [N] the request that it is forked from
        self.has_siblings = np.zeros(num_rows, np.bool_)  # [N] only these share partial pages
        self.is_tainted = np.zeros(num_rows, np.bool_)  # [N] some of its KV is not finite
        self.num_in_flight = np.zeros(num_rows, np.int32)  # [N] plans that name the row
        self.generation = np.zeros(num_rows, np.int32)  # [N] number of past tenants
        self.published = np.zeros(num_rows, np.int32)  # [N] pages named in the prefix cache
        self.num_speculating = 0  # rows

        # What few requests ask for. A step of rows without any of it costs nothing more.
        self.num_candidates = np.full(num_rows, NO_CANDIDATES, np.int32)  # [N] of log probabilities
        self.scores_prompt = np.zeros(num_rows, np.bool_)  # [N]
        self.is_constrained = np.zeros(num_rows, np.bool_)  # [N] a mask comes for each sample
        self.has_penalties = np.zeros(num_rows, np.bool_)  # [N]
        self.has_biases = np.zeros(num_rows, np.bool_)  # [N]
        self.is_beam = np.zeros(num_rows, np.bool_)  # [N] of a beam search: never planned ahead
        self.num_special = 0  # rows that ask for any of these
        self.num_beams = 0  # rows

        self.sampling = SamplingColumns(  # [N]
            np.zeros(num_rows, np.uint64),
            {name: np.zeros(num_rows, entry.dtype) for name, entry in SAMPLER_FIELDS.items()},
        )
        self.stop_ids = np.full((MAX_STOP_IDS, num_rows), NO_TOKEN, np.int32)  # [K, N]
        self.has_more_stops = np.zeros(num_rows, np.bool_)  # [N] more than K: ask the request

        self.running: dict[int, Request] = {}  # row → tenant, finished ones too; by admission
        self._free = list(range(num_rows - 1, -1, -1))
        self._order: Int32 | None = None
        self.sampling_of = _LastGather(self._gather_sampling)
        self.tenants = _LastGather(self._gather_tenants)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def in_use(self) -> Int32:
        """The rows with tenants, in order of admission. [R]"""
        if self._order is None:
            self._order = np.fromiter(self.running, np.int32, len(self.running))
        return self._order

    def next_free(self, count: int) -> list[int]:
        """Up to `count` free rows, last vacated first."""
        return self._free[: -count - 1 : -1] if count else []

    def assign(self, request: Request, row: int) -> None:
        """Makes a pending request the tenant of a free row, with nothing computed."""
        self._free.remove(row)
        request.row = row
        self.running[row] = request
        self._order = None
        self.sampling_of.forget()
        self.tenants.forget()
        for cleared in (
            self.computed, self.outstanding, self.num_drafts, self.awaits_drafts, self.is_decoding,
            self.is_finished, self.awaits_fork, self.is_tainted, self.num_in_flight, self.published,
        ):  # fmt: skip
            cleared[row] = 0
        self.known[row] = len(request.token_ids)
        self.limit[row] = request.max_total_tokens
        self.goal[row] = max(request.max_total_tokens - 1, request.num_prompt_tokens)
        self.num_speculating += request.speculate > 0
        self.last_token[row] = request.token_ids[-1]
        self.will_fork[row] = bool(request.siblings)
        self.has_siblings[row] = bool(request.siblings)
        sampling = request.sampling
        self.num_special += _is_special(request)
        wanted = sampling.logprobs
        self.is_beam[row] = request.beams is not None
        if request.beams is not None:
            self.num_beams += 1
            wanted = request.beams.search.num_candidates
        self.num_candidates[row] = NO_CANDIDATES if wanted is None else wanted
        self.scores_prompt[row] = request.num_unscored > 0
        self.is_constrained[row] = request.is_constrained
        self.has_penalties[row] = sampling.has_penalties
        self.has_biases[row] = sampling.has_biases
        for name, column in self.sampling.parameters.items():
            column[row] = getattr(sampling, name)
        self.sampling.streams[row] = streams(
            np.array([sampling.seed], np.uint64), np.array([request.index], np.uint64)
        )[0]
        stops = sorted(sampling.stop_token_ids)
        self.has_more_stops[row] = len(stops) > MAX_STOP_IDS
        self.stop_ids[:, row] = NO_TOKEN
        self.stop_ids[: len(stops), row] = stops[:MAX_STOP_IDS]

    def await_fork(self, row: int) -> None:
        """Marks the tenant as a sibling whose shared prompt is not computed yet."""
        self.awaits_fork[row] = True
        self.has_siblings[row] = True
        self.goal[row] = 0

    def finish(self, row: int) -> None:
        """Marks the tenant as ended: nothing more is planned for it."""
        self.is_finished[row] = True
        self.num_drafts[row] = 0
        self.goal[row] = 0

    def vacate(self, request: Request) -> None:
        """Frees the row of a request."""
        row = request.row
        del self.running[row]
        self.num_speculating -= request.speculate > 0
        self.num_special -= _is_special(request)
        self.num_beams -= request.beams is not None
        self.generation[row] += 1  # plans in flight mean the old tenant
        self._order = None
        self._free.append(row)
        request.num_in_flight = int(self.num_in_flight[row])
        request.row = NO_ROW

    def to_compute(self, rows: Int32) -> Int32:
        """num_tokens - num_computed_tokens, where num_tokens counts outstanding samples: the tokens
        that may be scheduled; 0 or less if none. [n]"""
        num_tokens: Int32 = np.minimum(self.known[rows] + self.outstanding[rows], self.goal[rows])
        num_tokens -= self.computed[rows]
        if self.num_speculating:
            num_tokens[self._is_held(rows)] = 0
        return num_tokens

    def is_ending(self, rows: Int32) -> npt.NDArray[np.bool_]:
        """Whether rows compute no more: ended, or ending with the plans in flight. [n]"""
        is_ending: npt.NDArray[np.bool_] = self.to_compute(rows) <= 0
        if self.num_speculating:
            is_ending &= ~self._is_held(rows)
        if self.num_beams:  # a beam waits for the others
            is_ending &= ~self.is_beam[rows] | self.is_finished[rows]
        return is_ending

    def is_verifying(self, rows: Int32 | int) -> npt.NDArray[np.bool_]:
        """Whether rows wait for the verdict on draft tokens. [n]"""
        is_verifying: npt.NDArray[np.bool_] = self.num_drafts[rows] > 0
        return is_verifying & (self.outstanding[rows] > 0)

    def _is_held(self, rows: Int32) -> npt.NDArray[np.bool_]:
        """Whether rows are not planned ahead: they continue from the verdict on drafts, or will
        probably draft behind their outstanding tokens. [n]"""
        may_draft = self.awaits_drafts[rows] & ~self.is_finished[rows]
        is_held: npt.NDArray[np.bool_] = may_draft & (self.outstanding[rows] > 0)
        return is_held | self.is_verifying(rows)

    def _gather_sampling(self, rows: Int32) -> SamplingColumns:
        parameters = {name: column[rows] for name, column in self.sampling.parameters.items()}
        return SamplingColumns(self.sampling.streams[rows], parameters)

    def _gather_tenants(self, rows: Int32) -> list[Request]:
        return list(map(self.running.__getitem__, rows.tolist()))

    def may_stop(self, rows: Int32, token_ids: Int32) -> npt.NDArray[np.bool_]:
        """Whether these tokens may be stop tokens of their rows; the request decides. [n]"""
        is_stop: npt.NDArray[np.bool_] = (self.stop_ids[:, rows] == token_ids).any(axis=0)
        return is_stop | self.has_more_stops[rows]


def _is_special(request: Request) -> bool:
    """Whether its plans hold more than tokens and the sampler's parameters."""
    sampling = request.sampling
    return (
        sampling.logprobs is not None
        or request.prompt_logprobs is not None
        or request.is_constrained
        or request.beams is not None
        or sampling.has_penalties
        or sampling.has_biases
    )
