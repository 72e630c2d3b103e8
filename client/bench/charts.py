"""The pictures of a report, each from plain numbers to one SVG."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import add

from client.bench.records import RequestRecord, StepRecord
from client.bench.svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Scale,
    area_path,
    element,
    level,
    line_path,
    picture,
    round_up,
    seconds_axis,
    text,
    tooltip,
)

COLUMNS = 640  # of a chart over time: what is finer is averaged
MOST_BARS = 400  # requests in a timeline; of more, evenly spread ones are shown
HEIGHT = 190.0
NARROW = 350.0  # width of pictures that stand beside others


@dataclass(frozen=True, slots=True)
class Layer:
    """One quantity of the steps, drawn on top of the layers before it."""

    class_: str
    value: Callable[[StepRecord], float]


def timeline(requests: Sequence[RequestRecord], seconds: float) -> str:
    """Every request through PENDING, PREFILLING and DECODING, in the order of sending."""
    rows = sorted(requests, key=lambda record: record.sent)
    if len(rows) > MOST_BARS:
        rows = [rows[number * len(rows) // MOST_BARS] for number in range(MOST_BARS)]
    pitch = min(16.0, max(2.0, 560 / len(rows)))
    x = Scale(max(seconds, 1e-9), LEFT, WIDTH - RIGHT)
    floor = TOP + pitch * len(rows)
    height = floor + BOTTOM
    parts = [
        element("line", x1=x(t), x2=x(t), y1=TOP, y2=floor, class_="grid") for t in x.ticks(10)
    ]
    for number, record in enumerate(rows):
        bars = [
            element("rect", x=x(start), y=TOP + pitch * number, width=max(x(end) - x(start), 0.5),
                    height=pitch * 0.8, class_=class_)
            for class_, start, end in phases(record)
        ]  # fmt: skip
        parts.append(element("g", tooltip(_told(record)) + "".join(bars), class_="request"))
        if number % -(-len(rows) // 12) == 0:
            middle = TOP + pitch * (number + 0.4) + 4
            parts.append(text(record.id[:7], LEFT - 8, middle, "tick", "end"))
    parts += seconds_axis(x, floor)
    return picture(height, parts, "When each request waited, computed its prompt and its answer")


def phases(record: RequestRecord) -> list[tuple[str, float, float]]:
    """(class, start, end) of what a request went through."""
    if record.first is None:
        return [("failed", record.sent, record.end)]
    first = record.first
    scheduled = max(record.sent, first - record.prefill_seconds)
    ends = "failed" if record.error else "decoding"
    return [
        ("pending", record.sent, scheduled),
        ("prefilling", scheduled, first),
        (ends, first, record.end),
    ]


def over_time(
    steps: Sequence[StepRecord],
    seconds: float,
    layers: Sequence[Layer],
    label: str,
    *,
    unit: str = "",
    line: Layer | None = None,
    least: float = 0.0,
) -> str:
    """Layers on top of each other, and a line over them. The axis ends at `least` or higher."""
    heights = [resample(steps, seconds, layer.value) for layer in layers]
    tops = list(itertools.accumulate(heights, lambda low, high: list(map(add, low, high))))
    over = resample(steps, seconds, line.value) if line else []
    top = round_up(max(least, *tops[-1], *over))
    x = Scale(max(seconds, 1e-9), LEFT, WIDTH - RIGHT)
    y = Scale(top, HEIGHT - BOTTOM, TOP)
    parts = [part for tick in y.ticks(4) for part in level(x, y(tick), f"{tick:g}{unit}")]
    parts += seconds_axis(x, y.start)
    below = [0.0] * COLUMNS
    for layer, above in zip(layers, tops, strict=True):
        d = area_path(_stairs(above, x, y), _stairs(below, x, y))
        parts.append(element("path", d=d, class_=layer.class_))
        below = above
    if line:
        parts.append(element("path", d=line_path(_stairs(over, x, y)), class_=line.class_))
    return picture(HEIGHT, parts, label)


def resample(
    steps: Sequence[StepRecord],
    seconds: float,
    value: Callable[[StepRecord], float],
) -> list[float]:
    """The value's mean over time in each of COLUMNS equal parts of the run. [COLUMNS]

    Where no step is, it is 0: nothing runs then. The moments between two steps do not show in a
    part that is mostly covered by steps.
    """
    sums, covered = [0.0] * COLUMNS, [0.0] * COLUMNS
    width = max(seconds, 1e-9) / COLUMNS
    for step in steps:
        first = max(0, int(step.start / width))
        for column in range(first, min(COLUMNS, int(step.end / width) + 1)):
            overlap = min(step.end, (column + 1) * width) - max(step.start, column * width)
            if overlap > 0:
                sums[column] += value(step) * overlap
                covered[column] += overlap
    return [
        total / (time if time > width / 2 else width)
        for total, time in zip(sums, covered, strict=True)
    ]


def distribution(values: Mapping[str, Sequence[float]], label: str) -> str:
    """The share of requests that took at most so long; one curve per system."""
    longest = max((max(found) for found in values.values() if found), default=1.0)
    x = Scale(round_up(longest), LEFT, NARROW - RIGHT)
    y = Scale(1.0, HEIGHT - BOTTOM, TOP)
    parts = [part for p in (50, 90, 99) for part in level(x, y(p / 100), f"p{p}")]
    parts += seconds_axis(x, y.start, about=5)
    for number, (system, found) in enumerate(values.items()):
        points = [(x(0.0), y(0.0))]
        for rank, value in enumerate(sorted(found)):
            points += [(x(value), y(rank / len(found))), (x(value), y((rank + 1) / len(found)))]
        points.append((x.stop, points[-1][1]))
        curve = element("path", tooltip(system), d=line_path(points), class_=f"curve c{number}")
        parts.append(curve)
    return picture(HEIGHT, parts, label, NARROW)


def bars(values: Mapping[str, float], shown: Callable[[float], str], label: str) -> str:
    """One bar per system, all from zero, each with its number."""
    pitch, width = 26.0, 1.5 * NARROW
    left = min(235.0, 24.0 + 7.0 * max(map(len, values)))  # room for the names
    longest = max(values.values(), default=0.0) or 1.0
    x = Scale(longest, left, width - 80)
    parts = []
    for number, (system, value) in enumerate(values.items()):
        y = TOP + pitch * number
        parts += [
            text(system, left - 10, y + 15, "label", "end"),
            element("rect", x=left, y=y, width=max(x(value) - left, 1.0), height=pitch * 0.75,
                    class_=f"bar c{number}", rx=2),
            text(shown(value), x(value) + 8, y + 15, "label"),
        ]  # fmt: skip
    return picture(TOP + pitch * len(values), parts, label, width)


def _stairs(values: Sequence[float], x: Scale, y: Scale) -> list[tuple[float, float]]:
    """A line with a flat piece per column; equal neighbours share theirs."""
    width = x.end / len(values)
    points: list[tuple[float, float]] = []
    for value, run in itertools.groupby(enumerate(values), key=lambda pair: pair[1]):
        columns = [column for column, _ in run]
        points += [(x(columns[0] * width), y(value)), (x((columns[-1] + 1) * width), y(value))]
    return points


def _told(record: RequestRecord) -> str:
    parts = [f"request {record.id}: {record.prompt_tokens} + {record.output_tokens} tokens"]
    if record.first is not None:
        parts.append(f"first after {record.first - record.sent:.2f} s")
    parts.append(f"ended after {record.end - record.sent:.2f} s")
    if record.cached_tokens:
        parts.append(f"{record.cached_tokens} prompt tokens cached")
    if record.preemptions:
        parts.append(f"{record.preemptions} preemptions")
    if record.error:
        parts.append(record.error)
    return ", ".join(parts)
