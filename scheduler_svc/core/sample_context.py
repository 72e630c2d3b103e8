"""What samples need besides logits and the sampler's parameters, as arrays of a plan: candidates to
report, the history that penalties see, and biases. Rows that ask for nothing cost nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from protos.plan import NO_CANDIDATES, UNKNOWN_TOKEN, Int32
from scheduler_svc.core.biases import Biases, Entries
from scheduler_svc.core.history import History
from scheduler_svc.core.memory.block_tables import starts
from scheduler_svc.core.reports import NOTHING
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import InFlight, State

Context = dict[str, npt.NDArray[Any]]  # by the names of a plan's arrays

_UNKNOWN: Final = np.array([UNKNOWN_TOKEN], np.int32)
_ONCE: Final = np.array([1], np.int32)


def sample_context(state: State, step: InFlight) -> Context:
    """Arrays of the plan from num_candidates to bias, but score_logits."""
    context = _nothing(len(step.sampled))
    if not state.rows.num_special:
        return context
    context = context.copy()
    if step.reports is not NOTHING:
        _add_reports(context, step)
    rows = state.rows
    sampled_rows = step.named[step.sampled_for]
    penalised = rows.has_penalties[sampled_rows].nonzero()[0]
    biased = rows.has_biases[sampled_rows].nonzero()[0]
    if len(penalised):
        _add_histories(context, step, penalised)
    if len(biased):
        _add_biases(context, step, biased)
    return context


@lru_cache(maxsize=256)
def _nothing(num_samples: int) -> Context:
    """The arrays of samples without context."""
    none, no_entries = np.zeros(0, np.int32), np.zeros(num_samples + 1, np.int32)
    context: Context = {
        "num_candidates": np.full(num_samples, NO_CANDIDATES, np.int32),
        "is_beam": np.zeros(num_samples, np.int32),
        "score_tokens": none,
        "score_candidates": none,
        "history_start": no_entries,
        "history_tokens": none,
        "history_counts": none,
        "bias_start": no_entries,
        "bias_tokens": none,
        "bias_after": none,
        "bias": np.zeros(0, np.float32),
    }
    for array in context.values():
        array.flags.writeable = False
    return context


def _add_reports(context: Context, step: InFlight) -> None:
    reports = step.reports
    context["num_candidates"] = reports.num_candidates
    context["is_beam"] = reports.is_beam.astype(np.int32)
    if reports.prompts:
        tokens = [scored.token_ids(step.requests[scored.place]) for scored in reports.prompts]
        context["score_tokens"] = np.concatenate(tokens)
        context["score_candidates"] = reports.prompt_candidates


def _add_histories(context: Context, step: InFlight, samples: npt.NDArray[np.intp]) -> None:
    tokens: list[Int32] = []
    counts: list[Int32] = []
    lengths = np.zeros(len(step.sampled), np.int32)
    for sample, request, _, drafts, is_last_unknown in _before(step, samples):
        distinct, times = history_of(request).entries(drafts)
        tokens.append(distinct)
        counts.append(times)
        lengths[sample] = len(distinct) + is_last_unknown
        if is_last_unknown:
            tokens.append(_UNKNOWN)
            counts.append(_ONCE)
    context["history_start"] = starts(lengths)
    context["history_tokens"] = np.concatenate(tokens)
    context["history_counts"] = np.concatenate(counts)


def _add_biases(context: Context, step: InFlight, samples: npt.NDArray[np.intp]) -> None:
    found: list[Entries] = []
    lengths = np.zeros(len(step.sampled), np.int32)
    for sample, request, position, drafts, is_last_unknown in _before(step, samples):
        num_output_tokens = position - request.num_prompt_tokens
        entries = biases_of(request).entries(
            num_output_tokens, request.token_ids, drafts, is_last_unknown
        )
        found.append(entries)
        lengths[sample] = len(entries[0])
    tokens, after, bias = zip(*found, strict=True)
    context["bias_start"] = starts(lengths)
    context["bias_tokens"] = np.concatenate(tokens)
    context["bias_after"] = np.concatenate(after)
    context["bias"] = np.concatenate(bias)


def _before(
    step: InFlight, samples: npt.NDArray[np.intp]
) -> Iterator[tuple[int, Request, int, Sequence[int], bool]]:
    """Of each sample: its index, request and position; the draft tokens between its known tokens
    and it; and whether there is a token that only the device knows."""
    places, ends = step.sampled_for[samples].tolist(), step.sample_ends[samples].tolist()
    for sample, place, end in zip(samples.tolist(), places, ends, strict=True):
        request = step.requests[place]
        num_more = end - len(request.token_ids)
        drafts = step.drafts.get(place, ())[:num_more] if num_more else ()
        num_unknown = num_more - len(drafts)
        assert num_unknown in (0, 1), f"{num_unknown} unknown tokens before {request.name}'s sample"
        yield sample, request, end, drafts, num_unknown == 1


def history_of(request: Request) -> History:
    """The history of all its known tokens."""
    if request.history is None:
        request.history = History(request.token_ids[: request.num_prompt_tokens])
    request.history.extend(request.token_ids)
    return request.history


def biases_of(request: Request) -> Biases:
    """Its biases and bans."""
    if request.biases is None:
        sampling = request.sampling
        request.biases = Biases(
            sampling.logit_bias, sampling.bad_words, sampling.stop_token_ids, sampling.min_tokens
        )
    return request.biases
