"""Reports as text and as a page: complete, escaped, self-contained."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from client.bench import charts
from client.bench.charts import COLUMNS, Layer, Scale, StepChart, round_up
from client.bench.figures import Limits
from client.bench.report_html import page as page_of
from client.bench.report_text import report, seconds
from tests.support.bench_records import request, result, step, two_requests

HOSTILE = '<script>alert("&")</script>'


class Tags(HTMLParser):
    """Which elements a page has, and what they point to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.targets: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.targets += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href")]


def pictures(page: str) -> list[ElementTree.Element]:
    """Every SVG of a page, as XML: what is not well-formed does not parse."""
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_the_text_report_says_the_figures() -> None:
    """What one reads in a terminal, and pastes into an issue."""
    text = report([result(two_requests(), two_requests("other"), limits=Limits(ttft=1.5))])
    assert re.search(r"output tokens per second +0\.7 +0\.7", text)
    assert re.search(r"end to end +6 s / 7\.6 s / 7\.96 s", text)
    assert re.search(r"goodput \(ttft 1\.5 s\) +0\.1/s \(50%\)", text)
    assert "chairlift: 1.00 times the output tokens per second of other" in text
    assert "2 cores" in text


def test_goodput_is_left_out_where_nothing_limits_it() -> None:
    """100 % of no limit says nothing."""
    assert "goodput" not in report([result()])


def test_what_no_system_knows_is_left_out_and_what_some_know_is_a_dash() -> None:
    """Rows of dashes hide the rows that matter."""
    silent = two_requests("other")
    silent.steps = []
    text = report([result(two_requests(), silent)])
    assert re.search(r"rows computed +4 \(25% wasted\) +–", text)  # noqa: RUF001
    assert "rows computed" not in report([result(silent)])
    assert "draft tokens" not in text


def test_notes_reach_the_reader() -> None:
    """A figure whose flaw is known and not told is a lie."""
    run = two_requests()
    run.notes.append("7 steps were missed")
    assert "note: chairlift, turn 1: 7 steps were missed" in report([result(run)])
    assert "7 steps were missed" in page_of([result(run)])


def test_a_comparison_has_a_column_per_result() -> None:
    """Static beside fifo is what this is for."""
    results = [result(label="static"), result(label="fifo")]
    head = next(line for line in report(results).splitlines() if "fifo" in line and ":" not in line)
    assert head.split() == ["static", "fifo"]
    page = page_of(results)
    assert len(pictures(page)) >= 8
    assert page.count(">static<") >= 2


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(0.00123, "1.23 ms"), (0.9, "900 ms"), (1.234, "1.23 s"), (99.9, "99.9 s"), (123.4, "123 s")],
)
def test_seconds_have_three_digits(value: float, wanted: str) -> None:
    """More are noise."""
    assert seconds(value) == wanted


def test_the_page_needs_nothing_but_itself() -> None:
    """A report in an issue or on a machine without network must still show everything."""
    tags = Tags(page_of([result(two_requests(), two_requests("other"))]))
    assert tags.targets == []
    assert "script" not in tags.names
    assert tags.names.count("svg") >= 7


def test_the_page_is_for_light_and_dark() -> None:
    """Colours that are written into a picture would suit one of them only."""
    page = page_of([result()])
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r'(fill|stroke)="', page)


def test_what_comes_from_outside_is_escaped() -> None:
    """Ids come from a file, notes and settings from a server: none of them may become markup."""
    run = two_requests()
    run.requests[0].id = run.requests[0].error = HOSTILE
    run.notes.append(HOSTILE)
    hostile = result(run)
    hostile.workload = hostile.label = HOSTILE
    hostile.server = {"config": {HOSTILE: HOSTILE}, "model": HOSTILE}
    for page in (page_of([hostile]), page_of([hostile, hostile])):
        assert "script" not in Tags(page).names
        assert pictures(page)


def bars_of(svg: str, class_: str) -> list[tuple[float, float]]:
    """(x, width) of the rectangles of a class."""
    return [
        (float(rect.attrib["x"]), float(rect.attrib["width"]))
        for rect in ElementTree.fromstring(svg).iter("rect")
        if rect.attrib["class"] == class_
    ]


def test_the_timeline_shows_the_three_states_to_scale() -> None:
    """Sent at 0, first token at 1 after half a second of prefill, the last one at 4, of 10."""
    svg = charts.timeline(two_requests().requests[:1], 10.0)
    x = Scale(10.0, 56, charts.WIDTH - charts.RIGHT)
    for class_, start, end in (("pending", 0, 0.5), ("prefilling", 0.5, 1), ("decoding", 1, 4)):
        ((left, width),) = bars_of(svg, class_)
        assert left == pytest.approx(x(start), abs=0.1)
        assert width == pytest.approx(x(end) - x(start), abs=0.1)


def test_a_request_without_tokens_is_drawn_as_failed() -> None:
    """A gap in the picture would look like a request that never was."""
    failed = request("x", 1.0, [])
    failed.error, failed.end = "UNAVAILABLE: no", 3.0
    assert charts.phases(failed) == [("failed", 1.0, 3.0)]


def test_a_timeline_of_very_many_requests_stays_a_picture() -> None:
    """Ten thousand rows of markup would not load."""
    svg = charts.timeline([request(str(n), float(n), [n + 1.0]) for n in range(10_000)], 10_001.0)
    assert len(bars_of(svg, "decoding")) == charts.MAX_BARS


def test_resampling_keeps_the_time_that_a_value_held() -> None:
    """A quarter of the run at 8, a quarter at 2, the rest idle."""
    steps = [step(0.0, 2.5, num_decoding=8), step(5.0, 2.5, num_decoding=2)]
    found = charts.resample(steps, 10.0, lambda s: s.num_decoding)
    quarter = COLUMNS // 4
    assert found[: quarter - 1] == pytest.approx([8.0] * (quarter - 1))
    assert found[quarter + 1 : 2 * quarter - 1] == pytest.approx([0.0] * (quarter - 2))
    assert found[2 * quarter + 1 : 3 * quarter - 1] == pytest.approx([2.0] * (quarter - 2))


def test_many_short_steps_are_averaged() -> None:
    """A run of a million steps must not become a million points."""
    steps = [step(n / 1000, 1 / 1000, num_decoding=n % 2) for n in range(20 * COLUMNS)]
    found = charts.resample(steps, 0.02 * COLUMNS, lambda s: s.num_decoding)
    assert found == pytest.approx([0.5] * COLUMNS, abs=0.05)
    layer = Layer("decoding", "decoding", lambda s: s.num_decoding)
    svg = charts.over_time(steps, 0.02 * COLUMNS, StepChart("rows", "", (layer,)))
    assert len(svg) < 60_000


@pytest.mark.parametrize(
    ("value", "wanted"), [(0, 1), (0.6, 0.6), (7, 8), (28, 30), (99, 100), (101, 150), (1e-4, 1e-4)]
)
def test_axes_end_at_round_numbers(value: float, wanted: float) -> None:
    """Labels like 13.37 cannot be read off."""
    assert round_up(value) == pytest.approx(wanted)
    assert len(Scale(wanted, 0, 1).ticks(4)) in range(3, 8)
