"""Just enough SVG: elements as text, a linear scale with round ticks, and a frame with axes.

Colours are CSS classes, so that one picture suits a light page and a dark one.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH = 1040
LEFT, RIGHT, TOP, BOTTOM = 56, 22, 8, 30  # room around the plot for labels

Point = tuple[float, float]


def element(name: str, content: str = "", **attributes: object) -> str:
    """One element. `class_` is class, and _ in other names is -; values and nothing else are
    escaped: `content` is markup already."""
    written = "".join(
        f' {"class" if key == "class_" else key.replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
    )
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def text(content: str, x: float, y: float, class_: str = "", anchor: str = "start") -> str:
    return element("text", html.escape(content), x=x, y=y, class_=class_, text_anchor=anchor)


def tooltip(content: str) -> str:
    """Shown while the pointer rests on the element that it is put into."""
    return element("title", html.escape(content))


def picture(height: float, parts: Iterable[str], label: str, width: float = WIDTH) -> str:
    """A whole picture, as wide as its place; `label` is for those who cannot see it."""
    return element(
        "svg",
        "".join(parts),
        viewBox=f"0 0 {_value(width)} {_value(height)}",
        role="img",
        aria_label=label,
    )


def line_path(points: Sequence[Point]) -> str:
    """The `d` of an open line."""
    return "M" + "L".join(f"{_value(x)} {_value(y)}" for x, y in points)


def area_path(upper: Sequence[Point], lower: Sequence[Point]) -> str:
    """The `d` of what lies between two lines, both from left to right."""
    return line_path([*upper, *reversed(lower)]) + "Z"


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps 0 … end to pixels start … stop."""

    end: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (self.stop - self.start) * value / self.end

    def ticks(self, about: int) -> list[float]:
        """Round numbers from 0 to the end, roughly so many."""
        step = round_step(self.end / about)
        return [number * step for number in range(math.floor(self.end / step + 1e-9) + 1)]


def round_step(wanted: float) -> float:
    """1, 2 or 5 times a power of ten: the smallest that is at least as big."""
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= wanted * (1 - 1e-9))


def round_up(value: float) -> float:
    """A round end for an axis that must show `value`; 1 for nothing at all."""
    if value <= 0:
        return 1.0
    step = round_step(value / 5)
    return step * math.ceil(value / step - 1e-9)


def level(x: Scale, y: float, label: str) -> list[str]:
    """A grid line at a height, with its label at the left."""
    return [
        element("line", x1=x.start, x2=x.stop, y1=y, y2=y, class_="grid"),
        text(label, x.start - 8, y + 4, "tick", "end"),
    ]


def seconds_axis(x: Scale, y: float, about: int = 10) -> list[str]:
    """The axis of a picture whose plot ends at this height."""
    ticks = [text(f"{tick:g} s", x(tick), y + 18, "tick", "middle") for tick in x.ticks(about)]
    return [*ticks, element("line", x1=x.start, x2=x.stop, y1=y, y2=y, class_="axis")]


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return html.escape(str(value))
