"""Workloads and arrivals: what a seed gives, what a file must hold."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path

import pytest

from client.bench.arrivals import parse_arrivals
from client.bench.synthetic import Recipe, make_requests, parse_lengths
from client.bench.workload import BadWorkload, WorkloadRequest, read_workload, write_workload

WORKLOADS = Path(__file__).parents[2] / "workloads"


def drawn(notation: str, count: int = 4000) -> list[int]:
    lengths, source = parse_lengths(notation), random.Random(1)
    return [lengths.draw(source) for _ in range(count)]


def test_a_fixed_length_is_fixed() -> None:
    """Equal lengths are the case in which continuous batching has least to gain."""
    assert set(drawn("64", 10)) == {64}


def test_uniform_lengths_cover_their_range_evenly() -> None:
    """An end that is never drawn, or a lean to one side, is another workload than was asked for."""
    values = drawn("uniform:10-19")
    assert set(values) == set(range(10, 20))
    assert all(300 < values.count(value) < 500 for value in range(10, 20))


def test_skewed_lengths_are_log_normal_between_their_ends() -> None:
    """The median is the geometric middle and the mean lies above it: few long ones weigh most."""
    values = drawn("skewed:10-500")
    assert min(values) >= 10
    assert max(values) <= 500
    assert statistics.median(values) == pytest.approx((10 * 500) ** 0.5, rel=0.1)
    assert statistics.fmean(values) > 1.3 * statistics.median(values)


@pytest.mark.parametrize("text", ["", "0", "-3", "1.5", "uniform:5-4", "uniform:0-4", "normal:1-2"])
def test_a_wrong_length_names_itself_and_what_is_allowed(text: str) -> None:
    """A typing mistake that measures something else is worse than an error."""
    with pytest.raises(ArgumentTypeError, match="allowed: N, uniform"):
        parse_lengths(text)


@pytest.mark.parametrize("text", ["64", "uniform:16-343", "skewed:8-256"])
def test_a_length_is_written_as_it_is_read(text: str) -> None:
    """A result must say what was measured."""
    assert str(parse_lengths(text)) == text


RECIPE = Recipe(
    num_requests=200,
    prompt=parse_lengths("uniform:3-9"),
    output=parse_lengths("5"),
    seed=7,
    shared_prefix=4,
    num_prefixes=2,
    num_priorities=3,
)


def test_one_seed_gives_one_workload() -> None:
    """Two measurements of the same recipe must be comparable."""
    assert make_requests(RECIPE, 100) == make_requests(RECIPE, 100)
    assert make_requests(RECIPE, 100) != make_requests(replace(RECIPE, seed=8), 100)


def test_prompts_share_prefixes_and_have_priorities() -> None:
    """Without sharing a prefix workload measures nothing of the prefix cache."""
    asks = make_requests(RECIPE, vocab_size=100)
    assert len({ask.prompt[:4] for ask in asks}) == 2
    assert {len(ask.prompt) for ask in asks} == set(range(7, 14))
    assert {ask.priority for ask in asks} == {0, 1, 2}
    assert {ask.max_new for ask in asks} == {5}
    assert all(0 <= token < 100 for ask in asks for token in ask.prompt)
    assert len({ask.prompt for ask in asks}) > 190, "own parts must differ"


def test_files_are_read_as_they_are_written(tmp_path: Path) -> None:
    """The comparison gets its work through such a file."""
    asks = [WorkloadRequest("a", (1, 2), 3, priority=4), WorkloadRequest("b", (5,), 1)]
    write_workload(tmp_path / "w.jsonl", asks)
    assert read_workload(tmp_path / "w.jsonl") == asks


@pytest.mark.parametrize(
    ("name", "requests", "tokens"),
    [
        ("mixed", 64, 5088),
        ("equal", 64, 4096),
        ("prefix", 64, 2048),
        ("single", 1, 128),
        ("copy", 24, 2508),
    ],
)
def test_the_workloads_in_the_repository(name: str, requests: int, tokens: int) -> None:
    """The figures of docs/benchmarks.md are about these numbers of requests and output tokens."""
    asks = read_workload(WORKLOADS / f"{name}.jsonl")
    assert (len(asks), sum(ask.max_new for ask in asks)) == (requests, tokens)


@pytest.mark.parametrize(
    "row",
    [
        {"id": 1, "prompt": [], "max_new": 1},
        {"id": 1, "prompt": [1], "max_new": 0},
        {"id": 1, "prompt": ["x"], "max_new": 1},
        {"id": 1, "prompt": "text", "max_new": 1},
        {"id": 1, "prompt": [1]},
        [1],
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, row: object) -> None:
    """Line 2 of 10,000 is what one has to be told."""
    path = tmp_path / "w.jsonl"
    good = {"id": 0, "prompt": [1], "max_new": 1}
    path.write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n")
    with pytest.raises(BadWorkload, match=r"w\.jsonl, line 2: allowed"):
        read_workload(path)


def test_ids_must_differ_and_there_must_be_one(tmp_path: Path) -> None:
    """Results are told apart by id."""
    path = tmp_path / "w.jsonl"
    path.write_text('{"id": 0, "prompt": [1], "max_new": 1}\n' * 2)
    with pytest.raises(BadWorkload, match="same id"):
        read_workload(path)
    path.write_text("\n")
    with pytest.raises(BadWorkload, match="no request"):
        read_workload(path)


def test_all_at_once() -> None:
    """Offline work arrives at the start."""
    assert parse_arrivals("all").times(3, seed=0) == [0.0, 0.0, 0.0]


def test_poisson_arrivals_have_their_rate_and_their_irregularity() -> None:
    """Gaps that are too even hide the queueing that a server must stand."""
    times = parse_arrivals("poisson:4").times(4000, seed=3)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times == sorted(times)
    assert times[0] == 0.0
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.06)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1), "exponential: both are equal"
    assert times == parse_arrivals("poisson:4").times(4000, seed=3)
    assert times != parse_arrivals("poisson:4").times(4000, seed=4)


def test_bursts() -> None:
    """Five requests, two at once, every half second."""
    assert parse_arrivals("bursts:2/0.5").times(5, seed=0) == [0.0, 0.0, 0.5, 0.5, 1.0]


@pytest.mark.parametrize(
    "text", ["", "none", "poisson:0", "poisson:-1", "bursts:0/1", "bursts:2/0"]
)
def test_a_wrong_arrival_names_itself_and_what_is_allowed(text: str) -> None:
    """As for lengths."""
    with pytest.raises(ArgumentTypeError, match="allowed: all, poisson"):
        parse_arrivals(text)
