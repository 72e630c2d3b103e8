"""`chairlift bench` against a real server: what it writes adds up."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.support.processes import Server

ASKS = [([7] * 40, 9), ([1, 2, 3], 5), ([4] * 130, 3), ([5, 6], 12), ([8], 1), ([7] * 40, 9)]


@pytest.fixture(scope="module")
def measured(tiny_server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two turns over six requests; the JSON, and the page as `page`, the text as `text`."""
    folder = tmp_path_factory.mktemp("bench")
    rows = [
        {"id": number, "prompt": prompt, "max_new": count}
        for number, (prompt, count) in enumerate(ASKS)
    ]
    (folder / "six.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "client", "bench", "--address", tiny_server.address),
            *("--workload", str(folder / "six.jsonl"), "--turns", "2", "--slo-ttft", "30"),
            *("--json", str(folder / "out.json"), "--html", str(folder / "out.html")),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return {**found, "page": (folder / "out.html").read_text(), "text": done.stdout}


def test_every_request_got_its_tokens(measured: dict[str, Any]) -> None:
    """Throughput is these tokens over these seconds; both must be right."""
    assert [run["turn"] for run in measured["runs"]] == [0, 1]
    wanted = sum(count for _, count in ASKS)
    for run in measured["runs"]:
        for record, (prompt, count) in zip(run["requests"], ASKS, strict=True):
            assert record["error"] is None
            assert record["prompt_tokens"] == len(prompt)
            assert sum(tokens for _, tokens in record["deliveries"]) == count
            moments = [moment for moment, _ in record["deliveries"]]
            assert 0 <= record["sent"] <= moments[0]
            assert moments == sorted(moments)
            assert moments[-1] <= record["end"]
        figures = run["figures"]
        assert figures["output_tokens"] == wanted
        assert figures["output_tokens_per_second"] * figures["seconds"] == pytest.approx(wanted)
        assert figures["good_share"] == 1.0


def test_the_steps_are_all_there_and_account_for_every_token(measured: dict[str, Any]) -> None:
    """The charts, the KV figures and the row-steps of a comparison come from them."""
    prompts = sum(len(prompt) for prompt, _ in ASKS)
    outputs = sum(count for _, count in ASKS)
    for run in measured["runs"]:
        steps, notes = run["steps"], run["notes"]
        assert notes == []
        computed = sum(step["num_tokens"] for step in steps)
        # the last token of an answer is never computed; cached tokens need not be
        assert computed == prompts - run["prefix_hits"] + outputs - len(ASKS)
        assert max(step["num_running"] for step in steps) == run["figures"]["most_at_once"] <= 6
        assert all(0 < step["utilisation"] <= 1 for step in steps)
        assert all(0 < step["device_seconds"] <= step["seconds"] + 0.005 for step in steps)
        assert all(
            earlier["start"] <= later["start"] for earlier, later in itertools.pairwise(steps)
        )
        assert steps[0]["start"] >= -0.1
        assert steps[-1]["start"] <= max(record["end"] for record in run["requests"])


def test_each_turn_begins_with_an_empty_prefix_cache(measured: dict[str, Any]) -> None:
    """Or the second turn of any workload would find all of its prompts."""
    first, second = (run["prefix_hits"] for run in measured["runs"])
    assert first == second < 40, "the two equal prompts share at most that much"


def test_a_result_says_where_it_comes_from(measured: dict[str, Any]) -> None:
    """A figure without machine, versions and settings cannot be repeated."""
    assert measured["machine"]["cores"] >= 1
    assert measured["machine"]["memory_gib"] > 0
    assert "grpcio" in measured["versions"]
    assert measured["seed"] == 0
    assert measured["server"]["config"]["max_batch_tokens"] == "96"
    assert measured["server"]["dtype"] == "float32"


def test_the_reports_show_it(measured: dict[str, Any]) -> None:
    """What a person sees of all that."""
    assert re.search(rf"output tokens +{sum(count for _, count in ASKS)}\n", measured["text"])
    assert "six.jsonl, 6 requests" in measured["text"]
    assert measured["page"].count("<svg") >= 7
