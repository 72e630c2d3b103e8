"""Figures derived from the records of a run: throughput, latency, goodput, memory, steps.

docs/benchmarks.md defines each figure. Pure: numbers in, numbers out.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from client.bench.records import RequestRecord, Run, StepRecord


@dataclass(frozen=True, slots=True)
class Limits:
    """Longest latencies of a good request, in seconds; None = no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __str__(self) -> str:
        given = [f"{name} {value:g} s" for name, value in asdict(self).items() if value is not None]
        return ", ".join(given)


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution of seconds, over requests or over gaps between tokens."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run, in seconds, tokens and shares from 0 to 1; None = unknown.

    Those with a default come from the steps, which only Chairlift reports.
    """

    num_requests: int
    num_failed: int
    seconds: float  # first request sent to last one ended
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    total_tokens_per_second: float  # prompt and output
    requests_per_second: float
    ttft: Spread | None  # sent to first token
    tpot: Spread | None  # by request: first token to last, per token after the first
    itl: Spread | None  # gaps between tokens, of all requests together
    e2e: Spread | None  # sent to ended
    good_share: float  # of the requests, within the limits
    goodput: float  # good requests per second
    preemptions: int
    prefix_hit_rate: float | None  # of the prompt tokens looked up
    drafted: int = 0  # draft tokens verified
    accepted: int = 0  # of these, those that were right
    most_at_once: int | None = None  # maximum of requests that hold a row
    pool_share: float | None = None  # of the KV pool in use, mean over time
    pool_share_peak: float | None = None
    utilisation: float | None = None  # of the pages in use, the share that stores tokens; mean
    kv_use: float | None = None  # tokens stored / capacity of the whole pool, mean over time
    kv_use_peak: float | None = None
    num_steps: int | None = None
    row_steps: int | None = None  # rows computed, summed over the steps
    row_steps_wasted: int | None = None  # of these, rows of requests that had ended
    tokens_computed: int | None = None  # including prompts and recomputed tokens
    device_share: float | None = None  # of the run, the device computing


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolates linearly between ranks, as numpy by default. ValueError if there is no value."""
    if not values:
        raise ValueError("there is no percentile of nothing")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = ordered[int(rank)]
    return low + (ordered[min(int(rank) + 1, len(ordered) - 1)] - low) * (rank % 1)


def spread(values: Iterable[float | None]) -> Spread | None:
    """The distribution of the known values; None if there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    p50, p90, p99 = (percentile(known, percent) for percent in (50, 90, 99))
    return Spread(statistics.fmean(known), p50, p90, p99, max(known))


def ttft(record: RequestRecord) -> float | None:
    """Time to first token."""
    return None if record.first is None else record.first - record.sent


def tpot(record: RequestRecord) -> float | None:
    """Time per output token; None unless tokens came in at least two messages."""
    if record.first is None or len(record.deliveries) < 2:
        return None
    return (record.deliveries[-1][0] - record.first) / (record.output_tokens - 1)


def gaps(record: RequestRecord) -> list[float]:
    """The gaps between tokens; the gap before a message with k tokens counts as k equal ones."""
    return [
        (moment - previous) / count
        for (previous, _), (moment, count) in itertools.pairwise(record.deliveries)
        for _ in range(count)
    ]


def e2e(record: RequestRecord) -> float:
    """Time from end to end."""
    return record.end - record.sent


def is_good(record: RequestRecord, limits: Limits) -> bool:
    """Whether it is complete and within every limit; an undefined latency is within its limit."""
    pairs = (
        (ttft(record), limits.ttft),
        (tpot(record), limits.tpot),
        (e2e(record), limits.e2e),
    )
    return record.is_complete and all(
        limit is None or value is None or value <= limit for value, limit in pairs
    )


def figures(run: Run, limits: Limits) -> Figures:
    """The figures of a run with at least one request."""
    complete = [record for record in run.requests if record.is_complete]
    seconds = max(r.end for r in run.requests) - min(r.sent for r in run.requests)
    prompt = sum(record.prompt_tokens for record in complete)
    output = sum(record.output_tokens for record in complete)
    num_good = sum(is_good(record, limits) for record in complete)
    rate = 1 / seconds if seconds > 0 else 0.0
    return Figures(
        num_requests=len(run.requests),
        num_failed=len(run.requests) - len(complete),
        seconds=seconds,
        prompt_tokens=prompt,
        output_tokens=output,
        output_tokens_per_second=output * rate,
        total_tokens_per_second=(prompt + output) * rate,
        requests_per_second=len(complete) * rate,
        ttft=spread(map(ttft, complete)),
        tpot=spread(map(tpot, complete)),
        itl=spread(gap for record in complete for gap in gaps(record)),
        e2e=spread(map(e2e, complete)),
        good_share=num_good / len(run.requests),
        goodput=num_good * rate,
        preemptions=sum(record.preemptions for record in run.requests),
        drafted=sum(record.drafted_tokens for record in run.requests),
        accepted=sum(record.accepted_tokens for record in run.requests),
        prefix_hit_rate=run.prefix_hits / run.prefix_queries if run.prefix_queries else None,
        **(_step_figures(run.steps, seconds) if run.steps else {}),
    )


def _step_figures(steps: Sequence[StepRecord], seconds: float) -> dict[str, Any]:
    in_use = [step.pool_share for step in steps]
    stored = [step.pool_share * step.utilisation for step in steps]
    durations = [step.seconds for step in steps]
    return {
        "most_at_once": max(step.num_running for step in steps),
        "pool_share": _mean(in_use, durations),
        "pool_share_peak": max(in_use),
        "utilisation": _mean(
            [step.utilisation for step in steps],
            [step.pool_share * step.seconds for step in steps],
        ),
        "kv_use": _mean(stored, durations),
        "kv_use_peak": max(stored),
        "num_steps": len(steps),
        "row_steps": sum(step.rows for step in steps),
        "row_steps_wasted": sum(step.num_finished for step in steps),
        "tokens_computed": sum(step.num_tokens for step in steps),
        "device_share": sum(step.device_seconds for step in steps) / seconds if seconds else 0.0,
    }


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return statistics.fmean(values, weights) if any(weights) else 0.0


def median_of(turns: Sequence[Figures]) -> Figures:
    """The median of each figure over the turns; None if a turn does not know it."""
    names = [field.name for field in fields(Figures)]
    return Figures(**{name: _median([getattr(turn, name) for turn in turns]) for name in names})


def _median(values: Sequence[Any]) -> Any:
    if any(value is None for value in values):
        return None
    if isinstance(values[0], Spread):
        names = [field.name for field in fields(Spread)]
        return Spread(**{n: statistics.median(getattr(v, n) for v in values) for n in names})
    middle = statistics.median(values)
    return round(middle) if isinstance(values[0], int) else middle
