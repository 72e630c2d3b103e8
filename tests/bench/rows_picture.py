"""One SVG file that shows the rows of each step under several policies, one above the other.

For docs/benchmarks.md: all charts share their axes, and the colours follow the reader's light or
dark theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from client.bench.charts import HEIGHT, LEFT, RIGHT, WIDTH, element, over_time, text
from client.bench.report_html import ROWS, STYLE
from client.bench.result import Result

TITLE_HEIGHT = 34.0
WITHOUT_WAITING = replace(ROWS, line=None)


def rows_picture(results: Sequence[Result]) -> str:
    """The first run of each result, under its label."""
    runs = [result.systems()["chairlift"][0] for result in results]
    seconds = max(record.end for run in runs for record in run.requests)
    top = max(step.rows for run in runs for step in run.steps)
    parts = []
    for number, (result, run) in enumerate(zip(results, runs, strict=True)):
        y = number * (TITLE_HEIGHT + HEIGHT)
        parts.append(text(f"{result.label}: rows of each step", LEFT, y + 22))
        chart = over_time(run.steps, seconds, WITHOUT_WAITING, least=top)
        content = chart[chart.index(">") + 1 : chart.rindex("<")]  # without its own frame
        parts.append(element("g", content, transform=f"translate(0 {y + TITLE_HEIGHT})"))
    x = WIDTH - RIGHT
    for layer in reversed(ROWS.layers):
        x -= 8.0 * len(layer.name)
        parts.append(element("rect", x=x - 18, y=12, width=11, height=11, class_=layer.class_))
        parts.append(text(layer.name, x, 22))
        x -= 34
    return element(
        "svg",
        f"<style>\n{STYLE}</style>",
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH:g} {len(runs) * (TITLE_HEIGHT + HEIGHT):g}",
        role="img",
        aria_label="Rows computed in each step, by policy",
    )
