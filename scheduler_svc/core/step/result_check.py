"""How a worker's result can contradict its plan. Only a result that does not is absorbed."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from protos.plan import StepResult
from scheduler_svc.core.reports import NOTHING
from scheduler_svc.core.state import InFlight

MAX_MICROSECONDS: Final = 86_400_000_000  # of one step: a day
ROUNDING: Final = 1e-3  # a log probability may be above 0 by so much


def why_not_the_result(step: InFlight, result: StepResult, vocab_size: int = 0) -> str | None:
    """How a worker's result contradicts the plan; None if it does not. `vocab_size` bounds the
    token ids; 0 = unknown."""
    if result.step_id != step.step_id:
        return f"the result of step {result.step_id} came where {step.step_id} was due"
    if len(result.token_ids) != len(step.sampled):
        return f"{len(result.token_ids)} tokens for {len(step.sampled)} samples"
    if len(result.is_finite) != len(step.rows):
        return f"{len(result.is_finite)} verdicts on {len(step.rows)} rows"
    if vocab_size:
        odd = result.token_ids[(result.token_ids < 0) | (result.token_ids >= vocab_size)]
        if len(odd):
            return f"token {odd[0]} is outside of the vocabulary of {vocab_size}"
    if np.count_nonzero(result.is_finite >> 1):  # also of negative numbers
        odd = result.is_finite[result.is_finite >> 1 != 0]
        return f"{odd[0]} as a verdict on a row; allowed: 0, 1"
    for name in ("device_microseconds", "queue_microseconds"):
        if not 0 <= getattr(result, name) <= MAX_MICROSECONDS:
            return f"{name} is {getattr(result, name)}"
    reports = step.reports
    found = len(result.ranks), len(result.candidate_ids), len(result.logprobs)
    if found != (len(reports.sizes), reports.num_entries, reports.num_entries):
        return (
            f"{found[0]} ranks, {found[1]} candidates and {found[2]} log probabilities for "
            f"{len(reports.sizes)} reports of {reports.num_entries} candidates"
        )
    return None if reports is NOTHING else _why_not_the_reports(step, result, vocab_size)


def _why_not_the_reports(step: InFlight, result: StepResult, vocab_size: int) -> str | None:
    """The same of log probabilities; those of rows that are not finite may be anything."""
    reports, tokens = step.reports, step.reports.reported_samples
    places = [step.sampled[tokens]]
    own = [result.token_ids[tokens]]
    for scored in reports.prompts:
        own.append(scored.token_ids(step.requests[scored.place]))
        places.append(np.full(len(own[-1]), scored.place))
    is_sound = result.is_finite[np.concatenate(places)] == 1
    begins = reports.sizes.cumsum() - reports.sizes
    reported, right = result.candidate_ids[begins], np.concatenate(own)
    is_chosen = is_sound.copy()  # of a beam, no token is, and a bias may raise what it reports
    is_chosen[: len(tokens)] &= ~reports.is_beam[tokens]
    wrong = ((reported != right) & is_chosen).nonzero()[0]
    if len(wrong):
        return f"a report is on token {reported[wrong[0]]} where {right[wrong[0]]} was due"
    ranks, limit = result.ranks[is_sound], vocab_size or np.iinfo(np.int32).max - 1
    # a prompt may have tokens beyond the vocabulary: the least probable of all
    odd: npt.NDArray[np.generic] = ranks[(ranks < 1) | (ranks > limit + 1)]
    if len(odd):
        return f"a rank is {odd[0]}; allowed: 1 to {limit + 1}"
    is_entry_sound = is_sound.repeat(reports.sizes)
    logprobs = result.logprobs[is_entry_sound]
    most = np.where(is_chosen, ROUNDING, np.inf).repeat(reports.sizes)[is_entry_sound]
    odd = logprobs[~(logprobs <= most)]  # NaN, too
    if len(odd):
        return f"a log probability is {odd[0]}; allowed: at most 0"
    is_entry_sound[begins] = False
    others = result.candidate_ids[is_entry_sound]
    odd = others[(others < 0) | (others >= limit)]
    if len(odd):
        return f"candidate {odd[0]} is outside of the vocabulary of {limit}"
    return None
