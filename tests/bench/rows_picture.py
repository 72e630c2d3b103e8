"""One SVG file that shows what each step computed, under several policies, above each other.

For README: all share the axes, and the colours follow the reader's light or dark page.
"""

from __future__ import annotations

from collections.abc import Sequence

from client.bench import charts
from client.bench.charts import HEIGHT, WIDTH, Layer
from client.bench.records import Run
from client.bench.result import Result
from client.bench.style import STYLE
from client.bench.svg import LEFT, element, text

TITLE_HEIGHT = 34.0
LAYERS = (
    ("decoding", "decoding", lambda step: step.num_decoding),
    ("prefilling", "prompts", lambda step: step.num_prefilling),
    ("failed", "ended, computed all the same", lambda step: step.num_finished),
)


def rows_picture(results: Sequence[Result]) -> str:
    """The first run of each result; each is called by its label."""
    runs = [result.systems()["chairlift"][0] for result in results]
    seconds = max(record.end for run in runs for record in run.requests)
    top = max(step.rows for run in runs for step in run.steps)
    parts = []
    for number, (result, run) in enumerate(zip(results, runs, strict=True)):
        y = number * (TITLE_HEIGHT + HEIGHT)
        parts.append(text(f"{result.label}: rows of each step", LEFT, y + 22, "label"))
        chart = _chart(run, seconds, top)
        parts.append(element("g", chart, transform=f"translate(0 {y + TITLE_HEIGHT})"))
    x = WIDTH - 22.0
    for class_, name, _ in reversed(LAYERS):
        x -= 8.0 * len(name)
        parts.append(element("rect", x=x - 18, y=12, width=11, height=11, rx=2, class_=class_))
        parts.append(text(name, x, 22, "label"))
        x -= 34
    return element(
        "svg",
        f"<style>{STYLE}</style>" + "".join(parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {len(runs) * (TITLE_HEIGHT + HEIGHT):g}",
        role="img",
        aria_label="Rows computed in each step, by policy",
    )


def _chart(run: Run, seconds: float, top: int) -> str:
    """The content of the chart, without its own frame."""
    layers = [Layer(class_, value) for class_, _, value in LAYERS]
    svg = charts.over_time(run.steps, seconds, layers, "rows", least=top)
    return svg[svg.index(">") + 1 : svg.rindex("<")]
