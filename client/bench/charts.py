"""The charts of a report, each drawn as one SVG from records or numbers.

Drawn by hand because a plotting library would multiply the size of a client install, and would fix
the colours: here they are CSS classes (report.css), so that a page follows light and dark themes.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import add

from client.bench.records import RequestRecord, StepRecord

WIDTH, NARROW, HEIGHT = 1040.0, 350.0, 190.0  # of a picture, alone or beside others
LEFT, RIGHT, TOP, BOTTOM = 56.0, 22.0, 8.0, 30.0  # margins for labels
COLUMNS = 640  # resolution of a chart over time
MAX_BARS = 400  # requests in a timeline; of more, evenly spaced ones are shown

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Layer:
    """A quantity of the steps, with its colour and its name in the legend."""

    class_: str
    name: str
    value: Callable[[StepRecord], float]


@dataclass(frozen=True, slots=True)
class StepChart:
    """Quantities of the steps over time: stacked layers, and a line over them."""

    title: str
    note: str
    layers: tuple[Layer, ...]
    line: Layer | None = None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps 0 … end to pixels start … stop."""

    end: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (self.stop - self.start) * value / self.end

    def ticks(self, about: int) -> list[float]:
        """Round numbers from 0 to the end, roughly `about` of them."""
        step = _round_step(self.end / about)
        return [number * step for number in range(math.floor(self.end / step + 1e-9) + 1)]


def _round_step(least: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= least * (1 - 1e-9))


def round_up(value: float) -> float:
    """A round end for an axis that shows `value`; 1 if that is 0."""
    if value <= 0:
        return 1.0
    step = _round_step(value / 5)
    return step * math.ceil(value / step - 1e-9)


def element(name: str, *content: str, **attributes: object) -> str:
    """One element around `content`, which is markup. In attribute names a trailing _ is dropped and
    other _ are -; their values are escaped."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_written(value)}"'
        for key, value in attributes.items()
    )
    return f"<{name}{written}>{''.join(content)}</{name}>"


def _written(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else html.escape(str(value))


def text(content: str, x: float, y: float, class_: str = "label", anchor: str = "start") -> str:
    return element("text", html.escape(content), x=x, y=y, class_=class_, text_anchor=anchor)


def picture(parts: Iterable[str], label: str, width: float, height: float) -> str:
    """A whole SVG that fills the width of its place; `label` describes it to screen readers."""
    box = f"0 0 {width:g} {height:g}"
    return element("svg", *parts, viewBox=box, role="img", aria_label=label)


def timeline(requests: Sequence[RequestRecord], seconds: float) -> str:
    """A bar per request through its phases, in sending order."""
    rows = sorted(requests, key=lambda record: record.sent)
    rows = rows[:: -(-len(rows) // MAX_BARS)]
    pitch = min(16.0, max(2.0, 560 / len(rows)))
    x = Scale(max(seconds, 1e-9), LEFT, WIDTH - RIGHT)
    floor = TOP + pitch * len(rows)
    grid = [_line(x(tick), x(tick), TOP, floor) for tick in x.ticks(10)]
    parts = [*grid, *_axes(x, floor, {})]
    for number, record in enumerate(rows):
        y = TOP + pitch * number
        bars = [
            _bar(class_, x(start), y, max(x(end) - x(start), 0.5), pitch * 0.8)
            for class_, start, end in phases(record)
        ]
        title = element("title", html.escape(_description(record)))
        parts.append(element("g", title, *bars, class_="request"))
        if number % -(-len(rows) // 12) == 0:
            parts.append(text(record.id[:7], LEFT - 8, y + pitch * 0.4 + 4, "tick", "end"))
    return picture(parts, "The phases of each request", WIDTH, floor + BOTTOM)


def phases(record: RequestRecord) -> list[tuple[str, float, float]]:
    """The (class, start, end) of each phase of a request."""
    if record.first is None:
        return [("failed", record.sent, record.end)]
    scheduled = max(record.sent, record.first - record.prefill_seconds)
    return [
        ("pending", record.sent, scheduled),
        ("prefilling", scheduled, record.first),
        ("failed" if record.error else "decoding", record.first, record.end),
    ]


def _description(record: RequestRecord) -> str:
    parts = [f"request {record.id}: {record.prompt_tokens} + {record.output_tokens} tokens"]
    if record.first is not None:
        parts.append(f"first after {record.first - record.sent:.2f} s")
    parts.append(f"ended after {record.end - record.sent:.2f} s")
    if record.cached_tokens:
        parts.append(f"{record.cached_tokens} prompt tokens cached")
    if record.preemptions:
        parts.append(f"{record.preemptions} preemptions")
    return ", ".join([*parts, *([record.error] if record.error else [])])


def over_time(
    steps: Sequence[StepRecord], seconds: float, chart: StepChart, least: float = 0.0
) -> str:
    """Draws `chart` over the whole run. The vertical axis ends at `least` or above."""
    heights = [resample(steps, seconds, layer.value) for layer in chart.layers]
    tops = list(itertools.accumulate(heights, lambda low, high: list(map(add, low, high))))
    curve = resample(steps, seconds, chart.line.value) if chart.line else []
    x = Scale(max(seconds, 1e-9), LEFT, WIDTH - RIGHT)
    y = Scale(round_up(max(least, *tops[-1], *curve)), HEIGHT - BOTTOM, TOP)
    parts = _axes(x, y.start, {f"{tick:g}{chart.unit}": y(tick) for tick in y.ticks(4)})
    below = [0.0] * COLUMNS
    for layer, above in zip(chart.layers, tops, strict=True):
        outline = [*_stairs(above, x, y), *reversed(_stairs(below, x, y))]
        parts.append(_path(outline, layer.class_, "Z"))
        below = above
    if chart.line:
        parts.append(_path(_stairs(curve, x, y), chart.line.class_))
    return picture(parts, chart.title, WIDTH, HEIGHT)


def resample(
    steps: Sequence[StepRecord], seconds: float, value: Callable[[StepRecord], float]
) -> list[float]:
    """The mean over time of a value, in equal parts of the run. [COLUMNS]

    It is 0 where no step ran, but short gaps between steps do not lower the mean of a part.
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
    """The cumulative share of requests by seconds; one curve per system."""
    longest = max((max(found) for found in values.values() if found), default=1.0)
    x = Scale(round_up(longest), LEFT, NARROW - RIGHT)
    y = Scale(1.0, HEIGHT - BOTTOM, TOP)
    parts = _axes(x, y.start, {f"p{p}": y(p / 100) for p in (50, 90, 99)}, about=5)
    for number, (system, found) in enumerate(values.items()):
        points = [(x(0.0), y(0.0))]
        for rank, value in enumerate(sorted(found)):
            points += [(x(value), y(rank / len(found))), (x(value), y((rank + 1) / len(found)))]
        points.append((x.stop, points[-1][1]))
        title = element("title", html.escape(system))
        parts.append(_path(points, f"curve c{number}", "", title))
    return picture(parts, label, NARROW, HEIGHT)


def bars(values: Mapping[str, float], shown: Callable[[float], str], label: str) -> str:
    """One bar per system from zero, with its value."""
    pitch, width = 26.0, 1.5 * NARROW
    left = min(235.0, 24.0 + 7.0 * max(map(len, values)))  # room for the names
    x = Scale(max(values.values()) or 1.0, left, width - 80)
    parts = []
    for number, (system, value) in enumerate(values.items()):
        y = TOP + pitch * number
        parts += [
            text(system, left - 10, y + 15, anchor="end"),
            _bar(f"bar c{number}", left, y, max(x(value) - left, 1.0), pitch * 0.75),
            text(shown(value), x(value) + 8, y + 15),
        ]
    return picture(parts, label, width, TOP + pitch * len(values))


def _axes(x: Scale, floor: float, levels: Mapping[str, float], about: int = 10) -> list[str]:
    """A time axis at the height `floor`, and a labelled grid line at each level."""
    parts = [text(f"{tick:g} s", x(tick), floor + 18, "tick", "middle") for tick in x.ticks(about)]
    for label, y in levels.items():
        parts += [_line(x.start, x.stop, y, y), text(label, x.start - 8, y + 4, "tick", "end")]
    return [*parts, _line(x.start, x.stop, floor, floor, "axis")]


def _line(x1: float, x2: float, y1: float, y2: float, class_: str = "grid") -> str:
    return element("line", x1=x1, x2=x2, y1=y1, y2=y2, class_=class_)


def _bar(class_: str, x: float, y: float, width: float, height: float) -> str:
    return element("rect", x=x, y=y, width=width, height=height, class_=class_)


def _path(points: Points, class_: str, end: str = "", title: str = "") -> str:
    d = "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in points) + end
    return element("path", title, d=d, class_=class_)


def _stairs(values: Sequence[float], x: Scale, y: Scale) -> Points:
    """A line with a flat piece per column; equal neighbours share one."""
    width = x.end / len(values)
    points: Points = []
    for value, run in itertools.groupby(enumerate(values), key=lambda pair: pair[1]):
        columns = [column for column, _ in run]
        points += [(x(columns[0] * width), y(value)), (x((columns[-1] + 1) * width), y(value))]
    return points
