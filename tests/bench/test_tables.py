"""The tables of docs/benchmarks.md, from results whose figures are known."""

from __future__ import annotations

import dataclasses
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from client.bench.compare import SYSTEMS
from client.bench.records import Run
from client.bench.result import Result
from tests.bench import against_transformers, static_vs_fifo
from tests.bench.rows_picture import rows_picture
from tests.support.bench_records import request, result, step


def measured(slowness: float, rows: int, wasted: int = 0, label: str = "fifo") -> Result:
    """Four tokens, the last one after so many seconds; one step that computes these rows."""
    run = Run(
        "chairlift",
        0,
        [request("a", 0.0, [slowness / 4 * (n + 1) for n in range(4)])],
        [step(0.0, slowness, num_decoding=rows - wasted, num_finished=wasted, num_tokens=rows)],
    )
    return result(run, label=label)


def pair(slowness: float = 1.0) -> dict[str, list[Result]]:
    return {
        "static": [measured(6.0 * slowness, rows=90, wasted=50, label="static")],
        "fifo": [measured(2.0 * slowness, rows=30)],
    }


def line(table: str, title: str) -> list[str]:
    (found,) = [row for row in table.splitlines() if row.startswith(f"| {title} ")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_the_table_sets_ours_beside_the_published_figures() -> None:
    """The published ratio is about another engine: only side by side does it say something."""
    table = static_vs_fifo.table("mixed", "offline", pair())
    assert line(table, "output tokens per second")[1:] == [
        "0.667",
        "2",
        "3.00×",  # noqa: RUF001
        "420 → 1,350 (3.2×)",  # noqa: RUF001
    ]
    assert line(table, "end to end, p50")[1:4] == ["6 s", "2 s", "−67%"]  # noqa: RUF001
    assert line(table, "rows computed")[1:4] == ["90", "30", "−67%"]  # noqa: RUF001
    assert "throughput 3.00×, tokens computed 3.00× fewer: +0% apart" in table  # noqa: RUF001


def test_equal_lengths_have_a_published_figure_of_their_own() -> None:
    """3.2 times on equal lengths was never claimed."""
    table = static_vs_fifo.table("equal", "offline", pair())
    assert line(table, "output tokens per second")[-1] == "580 → 620 (+7 %)"
    assert line(table, "end to end, p50")[-1] == ""


def test_ratios_are_medians_over_the_turns() -> None:
    """The second turn on a machine that is busy, twice as slow for both: still three times."""
    turns = [pair(), pair(2.0), pair(4.0)]
    found = {policy: [turn[policy][0] for turn in turns] for policy in static_vs_fifo.POLICIES}
    table = static_vs_fifo.table("mixed", "poisson", found)
    assert "3 turns" in table
    assert line(table, "output tokens per second")[1:4] == ["0.333", "1", "3.00×"]  # noqa: RUF001


def test_what_is_there_is_found_turn_by_turn(tmp_path: Path) -> None:
    """A comparison that is measured in pieces is put together from its files."""
    for turn in (0, 1, 3):
        path = static_vs_fifo.file_of(tmp_path, "mixed", "offline", "fifo", turn)
        measured(1.0 + turn, 5).write(path)
    found = static_vs_fifo.turns(tmp_path, "mixed", "offline", "fifo")
    assert [figures.seconds for figures in map(static_vs_fifo.figures, found)] == [1.0, 2.0]
    assert static_vs_fifo.turns(tmp_path, "mixed", "offline", "static") == []


def test_poisson_needs_to_know_where_fifo_saturates(tmp_path: Path) -> None:
    """A rate out of the air would measure an idle server, or a queue without end."""
    options = static_vs_fifo.parse(["--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="needs the offline measurement"):
        static_vs_fifo.measure(options, "mixed", "poisson", "static", 0)


def test_the_picture_stands_by_itself_and_shows_what_was_wasted() -> None:
    """It goes into docs/benchmarks.md as a file: no style of a page around it."""
    svg = rows_picture([pair()["static"][0], pair()["fifo"][0]])
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme: dark" in svg
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "static: rows of each step" in texts
    assert "finished, computed anyway" in texts
    assert texts.count("90") <= 2
    assert texts.count("100") == 2, "both have the same axis"


def turn(slowness: float = 1.0) -> dict[str, Result]:
    """float32 twice as fast as static batches, int8 twice as fast as float32."""
    others = [
        dataclasses.replace(measured(seconds * slowness, 4).runs[0], system=system)
        for seconds, system in zip((4.0, 2.5), SYSTEMS.values(), strict=True)
    ]
    own = measured(2.0 * slowness, 4).runs[0]
    return {"float32": result(own, *others), "int8": measured(1.0 * slowness, 4)}


def cells(table: str, workload: str) -> list[str]:
    return line(table, workload)[1:]


def test_the_table_against_transformers() -> None:
    """Tokens per second, ratios to the others and of the formats; the second turn on a machine
    that is half as fast. Ratios of medians over turns would be those of different minutes."""
    found = {"mixed": [turn(), turn(2.0)]}
    table = against_transformers.table(found, ["float32", "int8"])
    assert cells(table, "workload")[4:8] == [
        "int8",
        "float32 over transformers static batches",
        "float32 over transformers continuous batching",
        "int8 over transformers static batches",
    ]
    speeds, ratios = ["0.8", "1.2", "1.5", "3.0"], ["2.00", "1.25", "4.00", "2.50", "2.00"]
    assert cells(table, "mixed") == ["2", *speeds, *ratios, "3.0", "1.5"]
    assert table.splitlines()[-1] == "a <fast> one, 2 cores, 1.5 GiB; commit abc"


def test_a_comparison_in_pieces_shows_what_is_there(tmp_path: Path) -> None:
    """float32 of the second turn is missing, and prefix has no yardstick at all."""
    for workload, weight_format, number in (
        ("mixed", "float32", 0),
        ("mixed", "int8", 0),
        ("mixed", "int8", 1),
        ("prefix", "int8", 0),
    ):
        path = against_transformers.file_of(tmp_path, workload, weight_format, number)
        turn(1.0 + number)[weight_format].write(path)
    found = {name: against_transformers.turns(tmp_path, name) for name in ("mixed", "prefix")}
    table = against_transformers.table(found, ["float32", "int8"])
    assert cells(table, "mixed")[:5] == ["2", "1.0", "1.6", "2.0", "3.0"]
    assert cells(table, "mixed")[-3:] == ["2.00", "2.0", "1.5"]
    assert cells(table, "prefix") == ["1", *["–"] * 3, "4.0", *["–"] * 6, "1.0"]  # noqa: RUF001


def test_transformers_runs_once_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes most of the time; and what is there already is not measured again."""
    ran: list[list[str]] = []

    def run(line: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(line)
        Path(line[line.index("--json") + 1]).touch()
        return subprocess.CompletedProcess(line, returncode=int("int8" in line and len(ran) == 2))

    monkeypatch.setattr(against_transformers.subprocess, "run", run)
    options = against_transformers.parse(["--out", str(tmp_path), "--compare", "static"])
    with pytest.raises(SystemExit, match="transformers-mixed-int8-1 failed"):
        against_transformers.measure_turn(options, "mixed", 0)
    for number in (0, 1, 0):
        against_transformers.measure_turn(options, "mixed", number)
    measured = [(line[-1], "transformers-static" in line) for line in ran]
    again = [("int8", False), ("float32", True), ("int8", False)]
    assert measured == [("float32", True), ("int8", False), *again]

    options = against_transformers.parse(["--out", str(tmp_path)])
    against_transformers.measure_turn(options, "prefix", 0)
    assert [(line[-1], "--compare" in line) for line in ran[5:]] == [
        ("float32", False),
        ("int8", False),
    ]
