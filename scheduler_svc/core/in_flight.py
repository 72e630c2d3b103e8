"""Plans in flight: what the scheduler must know when their results come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protos.plan import Int32
from scheduler_svc.core.memory.kv_memory import Transfers
from scheduler_svc.core.reports import Reports
from scheduler_svc.core.request import Request


class ConstrainedSample(NamedTuple):
    """A sample that only takes tokens that a grammar allows."""

    sample: int  # index into the plan's samples
    request: Request
    position: int  # of the token in its request
    drafts: tuple[int, ...]  # between the request's tokens and the sample; as good as known


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A plan without a result, kept because results carry no request ids.

    It names the rows that it computes, then the siblings that it forks off. It samples no token of
    a row, one, or one behind each draft token.
    """

    step_id: int
    rows: Int32  # [R] computed
    num_new_tokens: Int32  # [R]
    ends: Int32  # [R] tokens of each row after the step
    named: Int32  # [R + forks] rows
    generation: Int32  # [R + forks] of these rows, when planned
    requests: list[Request]  # [R + forks] their tenants
    sampled: npt.NDArray[np.intp]  # [S] index into rows: whose logits are sampled
    sampled_for: npt.NDArray[np.intp]  # [S] index into named: whose token it is
    sample_ends: Int32  # [S] position of the token in its request
    drafts: dict[int, tuple[int, ...]]  # index into rows → draft tokens to verify
    unsampled: list[int]  # index into rows: requests that end without a sample
    reports: Reports  # log probabilities that the result has to report
    constrained: npt.NDArray[np.intp]  # [M] index into the samples that await a grammar's mask
    admitted: list[Request]  # got their rows in this step
    new_tenants: Int32  # [I] rows assigned in this step
    transfers: Transfers
    freed_swap: list[Sequence[Int32]]  # swap blocks [G], free once the plan has returned

    def constrained_samples(self) -> list[ConstrainedSample]:
        """The samples that await a mask, in the plan's order."""
        samples = []
        for sample in self.constrained.tolist():
            place, position = int(self.sampled_for[sample]), int(self.sample_ends[sample])
            drafts = self.drafts.get(place, ())
            if drafts:  # a row's first sample is the one before its first draft token
                drafts = drafts[: sample - int(np.searchsorted(self.sampled_for, place))]
            samples.append(ConstrainedSample(sample, self.requests[place], position, drafts))
        return samples

    def reaches(self, ends: Int32 | None = None) -> list[tuple[Request, int]]:
        """The requests that the step computes or forks, each with the tokens that it has reached:
        `ends` [R] where drafts have been verified, else as planned."""
        forks = self.requests[len(self.rows) :]
        reached = (self.ends if ends is None else ends).tolist()
        reached += [sibling.num_prompt_tokens for sibling in forks]
        return list(zip(self.requests, reached, strict=True))
