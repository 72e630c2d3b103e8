"""The log probabilities that a step's result has to report, and what becomes of them.

Samples report first, in the plan's order, then the scored prompt tokens. A report has a rank and
1 + k entries: the token itself, then the k most probable ones (protos/plan.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from protos.plan import NO_CANDIDATES, Int32, StepResult
from scheduler_svc.core.request import Request, TokenScore


class ScoredPrompt(NamedTuple):
    """A piece of a prompt whose tokens are scored, by the logits of the tokens before."""

    place: int  # index into the step's rows
    begin: int  # position of its first scored token, at least 1
    end: int
    num_candidates: int  # k

    def token_ids(self, request: Request) -> Int32:
        """The scored tokens."""
        return request.first_tokens[self.begin : self.end]


@dataclass(frozen=True, eq=False)
class Reports:
    """What is to be reported of S samples and of prompts, K reports in all."""

    num_candidates: Int32  # [S] k, or NO_CANDIDATES for samples that are not reported
    prompts: list[ScoredPrompt]
    is_beam: npt.NDArray[np.bool_]  # [S] candidates of a beam, behind penalties and biases

    @cached_property
    def sizes(self) -> Int32:
        """Entries of each report, 1 + k. [K]"""
        of_samples = self.num_candidates[self.num_candidates != NO_CANDIDATES]
        sizes: Int32 = np.concatenate([of_samples, self.prompt_candidates]) + np.int32(1)
        return sizes

    @cached_property
    def num_entries(self) -> int:
        """Of all reports."""
        return int(self.sizes.sum())

    @cached_property
    def prompt_candidates(self) -> Int32:
        """k of each scored token. [Q]"""
        counts = [np.full(s.end - s.begin, s.num_candidates, np.int32) for s in self.prompts]
        return np.concatenate([*counts, np.zeros(0, np.int32)])

    @property
    def reported_samples(self) -> npt.NDArray[np.intp]:
        """The samples that are reported, in order."""
        return np.flatnonzero(self.num_candidates != NO_CANDIDATES)

    def scores(self, result: StepResult) -> Iterator[TokenScore]:
        """The K reports of a result."""
        if self is NOTHING:
            return iter(())
        ids, logprobs = result.candidate_ids.tolist(), result.logprobs.tolist()
        ranks = result.ranks.tolist()
        if len(ids) == len(ranks):
            return map(TokenScore, ids, logprobs, ranks)
        entries = list(zip(ids, logprobs, strict=True))
        ends = self.sizes.cumsum().tolist()
        begins = (self.sizes.cumsum() - self.sizes).tolist()
        return (
            TokenScore(ids[begin], logprobs[begin], rank, tuple(entries[begin + 1 : end]))
            for begin, end, rank in zip(begins, ends, ranks, strict=True)
        )


NOTHING: Final = Reports(  # whatever the number of samples
    np.zeros(0, np.int32), [], np.zeros(0, np.bool_)
)
