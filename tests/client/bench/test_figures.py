"""What records add up to, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from client.bench.figures import (
    Limits,
    Spread,
    figures,
    gaps,
    median_of,
    percentile,
    spread,
    tpot,
    ttft,
)
from client.bench.records import RequestRecord, Run
from client.bench.result import NotAResult, read_result
from tests.support.bench_records import request, result, two_requests


@pytest.mark.parametrize(
    ("percent", "wanted"), [(0, 1.0), (50, 3.0), (90, 4.6), (99, 4.96), (100, 5.0)]
)
def test_percentiles_equal_numpys(percent: float, wanted: float) -> None:
    """p99 of a small sample depends on the definition: this is numpy's default one."""
    numpy = pytest.importorskip("numpy")
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert percentile(values, percent) == pytest.approx(wanted)
    assert percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)))


def test_a_percentile_of_nothing_is_an_error_and_a_spread_of_nothing_is_none() -> None:
    """A 0 s p99 of a run in which all failed would be praise."""
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 50)
    assert spread([]) is None


def test_the_latencies_of_a_request() -> None:
    """Sent at 2, tokens at 4, 7 and 10."""
    record = request("b", 2.0, [4.0, 7.0, 10.0])
    assert ttft(record) == 2.0
    assert tpot(record) == 3.0
    assert gaps(record) == [3.0, 3.0]


def test_a_message_with_several_tokens_is_that_many_gaps() -> None:
    """Messages that coalesce must not make the gaps fewer, nor the time per token longer."""
    record = RequestRecord("c", 1, 4, 0.0, deliveries=[(1.0, 1), (4.0, 3)], end=4.0)
    assert gaps(record) == [1.0, 1.0, 1.0]
    assert tpot(record) == 1.0
    one = RequestRecord("d", 1, 4, 0.0, deliveries=[(1.0, 4)], end=1.0)
    assert tpot(one) is None


def test_figures_of_a_run() -> None:
    """The whole table, from seven tokens in ten seconds."""
    found = figures(two_requests(), Limits())
    assert (found.num_requests, found.num_failed) == (2, 0)
    assert (found.seconds, found.prompt_tokens, found.output_tokens) == (10.0, 20, 7)
    assert found.output_tokens_per_second == pytest.approx(0.7)
    assert found.total_tokens_per_second == pytest.approx(2.7)
    assert found.requests_per_second == pytest.approx(0.2)
    assert found.ttft == Spread(mean=1.5, p50=1.5, p90=1.9, p99=pytest.approx(1.99), max=2.0)
    assert found.e2e is not None
    assert (found.e2e.p50, found.e2e.max) == (6.0, 8.0)
    assert found.itl is not None
    assert found.itl.mean == pytest.approx((3 * 1.0 + 2 * 3.0) / 5)
    assert (found.preemptions, found.prefix_hit_rate) == (1, 0.25)


def test_figures_of_the_steps() -> None:
    """Memory counts by time: one second at half the pool, three at all of it."""
    found = figures(two_requests(), Limits())
    assert (found.most_at_once, found.num_steps) == (2, 2)
    assert (found.row_steps, found.row_steps_wasted) == (1 + 3, 1)
    assert found.pool_share == pytest.approx((0.5 * 1 + 1.0 * 3) / 4)
    assert found.pool_share_peak == 1.0
    # tokens stored: 0.4 of the pool for 1 s, 0.5 for 3 s
    assert found.kv_use == pytest.approx((0.4 * 1 + 0.5 * 3) / 4)
    assert found.kv_use_peak == 0.5
    assert found.utilisation == pytest.approx(found.kv_use / found.pool_share)
    assert found.device_share == pytest.approx(2.0 / 10)


def test_without_steps_their_figures_are_unknown_not_zero() -> None:
    """A system that does not tell would look as if it used no memory."""
    found = figures(Run("x", 0, two_requests().requests), Limits())
    assert found.kv_use is found.most_at_once is found.row_steps is None


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        (Limits(), 2),
        (Limits(ttft=1.5), 1),
        (Limits(tpot=1.0), 1),
        (Limits(e2e=3.9), 0),
        (Limits(ttft=1.5, tpot=0.5), 0),
    ],
)
def test_goodput_counts_requests_within_every_limit(limits: Limits, good: int) -> None:
    """Throughput bought with latency is not good."""
    found = figures(two_requests(), limits)
    assert found.goodput == pytest.approx(good / 10)
    assert found.good_share == good / 2


def test_a_request_that_failed_counts_as_failed_and_as_nothing_else() -> None:
    """Quick failures would make a server look quick."""
    run = two_requests()
    run.requests[1].error = "UNAVAILABLE: gone"
    short = request("c", 0.0, [1.0])
    short.max_new = 2
    run.requests.append(short)
    found = figures(run, Limits())
    assert (found.num_requests, found.num_failed, found.output_tokens) == (3, 2, 4)
    assert found.good_share == pytest.approx(1 / 3)
    assert found.e2e is not None
    assert found.e2e.max == 4.0


def test_medians_over_turns() -> None:
    """One turn in which the machine was busy must not decide."""
    one = figures(two_requests(), Limits())
    slow = dataclasses.replace(one, seconds=100.0, output_tokens_per_second=0.07, kv_use=None)
    middle = median_of([one, slow, one])
    assert (middle.seconds, middle.output_tokens_per_second) == (10.0, one.output_tokens_per_second)
    assert middle.ttft == one.ttft
    assert middle.kv_use is None, "not known of every turn"
    assert isinstance(middle.num_requests, int)


def test_ratios_are_taken_turn_by_turn() -> None:
    """A machine that slows down between turns must not change a ratio."""

    def at(seconds: float, system: str, turn: int) -> Run:
        return Run(system, turn, [request("a", 0.0, [seconds] * 4)])

    # each turn half as fast as the last; the ratios are 3, 3, 3
    runs = [
        run
        for turn, slowness in enumerate((1.0, 2.0, 4.0))
        for run in (at(slowness, "chairlift", turn), at(3 * slowness, "other", turn))
    ]
    assert result(*runs).ratios() == {"other": pytest.approx(3.0)}


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Reports of old files are made from what they keep."""
    written = result(two_requests(), two_requests("other"), limits=Limits(ttft=1.0))
    path = tmp_path / "fifo.json"
    written.write(path)
    read = read_result(path)
    assert read.figures() == written.figures()
    assert read.runs == written.runs
    assert read.label == "fifo", "a file without a label is called by its name"
    assert json.loads(path.read_text())["figures"]["chairlift"]["output_tokens"] == 7


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": 99}', '{"format": 1}'])
def test_what_is_no_result_is_refused_by_name(tmp_path: Path, content: str) -> None:
    """Rather than a KeyError from the depth."""
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(NotAResult, match=r"other\.json"):
        read_result(path)
