"""What the records of a run add up to: throughput, latencies, goodput, memory, steps.

docs/benchmarks.md says what each figure means. Pure: numbers in, numbers out.
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
    """Seconds that a request may take to count as good; None = whatever it takes."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __str__(self) -> str:
        given = [f"{name} {value:g} s" for name, value in asdict(self).items() if value is not None]
        return ", ".join(given)


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds, over requests (or over gaps between tokens)."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run. Seconds, tokens, shares from 0 to 1; None where nothing is known.

    What comes from the steps is known only of Chairlift, where they were watched.
    """

    num_requests: int
    num_failed: int
    seconds: float  # first request sent to last one ended
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    total_tokens_per_second: float  # prompts too
    requests_per_second: float
    ttft: Spread | None  # sent to first token
    tpot: Spread | None  # of each request: first token to last, per token after the first
    itl: Spread | None  # gaps between tokens, of all requests together
    e2e: Spread | None  # sent to ended
    good_share: float  # of the requests, within the limits
    goodput: float  # good requests per second
    preemptions: int
    prefix_hit_rate: float | None  # of the prompt tokens looked up
    most_at_once: int | None = None  # requests that held a row at the same time
    pool_share: float | None = None  # of the KV pool held, mean over time
    pool_share_peak: float | None = None
    utilisation: float | None = None  # of the held pages that hold tokens, mean over what was held
    kv_use: float | None = None  # tokens stored, of what the whole pool could hold, mean over time
    kv_use_peak: float | None = None
    num_steps: int | None = None
    row_steps: int | None = None  # rows computed, added up over the steps
    row_steps_wasted: int | None = None  # of these, for requests that had ended
    tokens_computed: int | None = None  # prompt tokens too, and what was computed twice
    device_share: float | None = None  # of the run, the device computing

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks, as numpy's default; ValueError if
    there is no value."""
    if not values:
        raise ValueError("a percentile of nothing")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Iterable[float]) -> Spread | None:
    """None of nothing."""
    known = sorted(values)
    if not known:
        return None
    p50, p90, p99 = (percentile(known, percent) for percent in (50, 90, 99))
    return Spread(statistics.fmean(known), p50, p90, p99, known[-1])


def ttft(record: RequestRecord) -> float | None:
    return None if record.first is None else record.first - record.sent


def tpot(record: RequestRecord) -> float | None:
    """None where fewer than two tokens came, or all of them in one message."""
    if record.first is None or len(record.deliveries) < 2:
        return None
    later = record.output_tokens - 1
    return (record.deliveries[-1][0] - record.first) / later


def gaps(record: RequestRecord) -> list[float]:
    """Between tokens; of a message with k tokens the gap before it is k equal ones."""
    return [
        (moment - previous) / count
        for (previous, _), (moment, count) in itertools.pairwise(record.deliveries)
        for _ in range(count)
    ]


def e2e(record: RequestRecord) -> float:
    return record.end - record.sent


def is_good(record: RequestRecord, limits: Limits) -> bool:
    """Complete, and within every limit; what a request has not (a gap, say) meets its limit."""
    pairs = (
        (ttft(record), limits.ttft),
        (tpot(record), limits.tpot),
        (e2e(record), limits.e2e),
    )
    return record.is_complete and all(
        limit is None or value is None or value <= limit for value, limit in pairs
    )


def figures(run: Run, limits: Limits) -> Figures:
    """Of a run with at least one request."""
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
        ttft=spread(value for r in complete if (value := ttft(r)) is not None),
        tpot=spread(value for r in complete if (value := tpot(r)) is not None),
        itl=spread(gap for record in complete for gap in gaps(record)),
        e2e=spread(e2e(record) for record in complete),
        good_share=num_good / len(run.requests),
        goodput=num_good * rate,
        preemptions=sum(record.preemptions for record in run.requests),
        prefix_hit_rate=run.prefix_hits / run.prefix_queries if run.prefix_queries else None,
        **_of_steps(run.steps, seconds),
    )


def _of_steps(steps: Sequence[StepRecord], seconds: float) -> dict[str, Any]:
    if not steps:
        return {}
    held = [step.chunks_used / step.chunks_total if step.chunks_total else 0.0 for step in steps]
    used = [share * step.utilisation for share, step in zip(held, steps, strict=True)]
    # each step counts by how long it took
    weights = [step.seconds for step in steps]
    return {
        "most_at_once": max(step.num_running for step in steps),
        "pool_share": _mean(held, weights),
        "pool_share_peak": max(held),
        "utilisation": _mean(
            [step.utilisation for step in steps],
            [share * weight for share, weight in zip(held, weights, strict=True)],
        ),
        "kv_use": _mean(used, weights),
        "kv_use_peak": max(used),
        "num_steps": len(steps),
        "row_steps": sum(step.rows for step in steps),
        "row_steps_wasted": sum(step.num_finished for step in steps),
        "tokens_computed": sum(step.num_tokens for step in steps),
        "device_share": sum(step.device_seconds for step in steps) / seconds if seconds else 0.0,
    }


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    total = sum(weights)
    if not total:
        return 0.0
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total


def median_of(several: Sequence[Figures]) -> Figures:
    """Each figure's median over turns, taken by itself; None where a turn has none."""
    names = [field.name for field in fields(Figures)]
    return Figures(**{name: _median([getattr(one, name) for one in several]) for name in names})


def _median(values: Sequence[Any]) -> Any:
    if any(value is None for value in values):
        return None
    if isinstance(values[0], Spread):
        names = [field.name for field in fields(Spread)]
        return Spread(**{n: statistics.median(getattr(v, n) for v in values) for n in names})
    middle = statistics.median(values)
    return round(middle) if isinstance(values[0], int) else middle
