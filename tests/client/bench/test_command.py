"""`chairlift bench` as a command: what it needs, what it writes, how it fails."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from client import cli
from client.bench.compare import SYSTEMS, Transformers
from client.bench.progress import Progress
from client.bench.workload import WorkloadRequest
from client.processes import launch
from client.processes.launch import LaunchError
from tests.client.bench.test_replay import CountingEngine
from tests.support.bench_records import result, two_requests
from tests.support.fake_server import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return CountingEngine()


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    rows = [{"id": n, "prompt": [n + 1], "max_new": n + 2} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_prints_its_figures_and_writes_its_files(
    address: str,
    engine: FakeEngine,
    workload: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The whole command, short of a real server; the first three requests of four, twice."""
    json_file, html_file = tmp_path / "out.json", tmp_path / "out.html"
    code = cli.main(
        [
            *("bench", "--address", address, "--workload", str(workload), "--requests", "3"),
            *(
                "--turns",
                "2",
                "--speculate",
                "5",
                "--json",
                str(json_file),
                "--html",
                str(html_file),
                "--label",
                "x",
            ),
        ]
    )
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "small.jsonl, 3 requests, speculate 5" in out
    assert [request.sampling.speculate for request in engine.requests[-3:]] == [5] * 3
    assert re.search(r"draft tokens \(accepted\) +12 \(75%\)", out)
    assert "turns     2" in out
    assert "3 of 3 requests, 9 of 9 tokens" in err, "progress must not get into the report"
    kept = json.loads(json_file.read_text())
    assert (kept["label"], len(kept["runs"]), kept["server"]["model"]) == ("x", 2, "fake-model")
    assert html_file.read_text().startswith("<!doctype html>")


def test_requests_are_made_up_from_a_seed(
    address: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a file at hand one still wants a figure."""
    recipe = ["--requests", "5", "--prompt", "3", "--output", "uniform:2-4", "--seed", "9"]
    assert cli.main(["bench", "--address", address, *recipe]) == 0
    out = capsys.readouterr().out
    assert "5 requests, prompts 3, outputs uniform:2-4, seed 9" in out
    sent = engine.requests[1:]  # the first one warms up
    assert {len(request.tokens.ids) for request in sent} == {3}
    assert {request.sampling.max_tokens for request in sent} <= {2, 3, 4}


def test_a_failed_request_fails_the_command(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that looks at the exit code must not take half a result for one."""
    path = tmp_path / "w.jsonl"
    path.write_text(
        '{"id": 0, "prompt": [1], "max_new": 1}\n{"id": 1, "prompt": [13], "max_new": 1}\n'
    )
    assert cli.main(["bench", "--address", address, "--workload", str(path)]) == 1
    assert "note: chairlift, turn 1: 1 of 2 requests failed" in capsys.readouterr().out


def test_files_are_shown_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs on two days, or under two policies."""
    for name in ("static", "fifo"):
        result(two_requests()).write(tmp_path / f"{name}.json")
    files = [str(tmp_path / "static.json"), str(tmp_path / "fifo.json")]
    page = tmp_path / "both.html"
    assert cli.main(["bench", "--report", *files, "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "static: two requests; all" in out
    assert "fifo" in out
    assert "static" in page.read_text()
    assert cli.main(["bench", "--report", files[0]]) == 0


def test_files_with_the_same_label_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Yesterday's fifo and today's: one column would hide the other."""
    files = [tmp_path / f"{day}.json" for day in ("monday", "tuesday")]
    for path in files:
        result(two_requests(), label="fifo").write(path)
    assert cli.main(["bench", "--report", *map(str, files)]) == 0
    out = capsys.readouterr().out
    assert all(f"fifo ({path})" in out for path in files)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--workload", "/nowhere.jsonl"], "No such file or directory: '/nowhere.jsonl'"),
        (["--report", "/nowhere.json"], "No such file or directory: '/nowhere.json'"),
        (["--json", "/nowhere/out.json"], "/nowhere is no folder"),
        (["--address", "127.0.0.1:1", "--", "--num-blocks", "5"], "needs --serve before it"),
    ],
)
def test_what_cannot_be_done_is_said(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a sentence, before anything has been started."""
    assert cli.main(["bench", *arguments]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [("--prompt", "long"), ("--arrivals", "often"), ("--turns", "0"), ("--compare", "others")],
)
def test_wrong_options_name_what_is_allowed(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """argparse's own "invalid parse_lengths value" helps nobody."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", option, value])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert option in message
    assert "allowed" in message or "choose from" in message


def test_a_server_that_does_not_start_is_quoted(tmp_path: Path) -> None:
    """ "It did not start" alone sends one looking for a log that is nowhere."""
    scheduler = "import sys; print('unknown option', sys.argv[-1]); sys.exit(2)"
    for package, code in (
        ("scheduler_svc", scheduler),
        ("worker", "import signal; signal.pause()"),
    ):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / "__main__.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "client", "bench", "--serve", "--", "--nonsense"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"},
    )
    assert done.returncode == 1
    assert "the server did not start. Its last output:\nunknown option" in done.stderr


COMPARE = """
import json, sys
rows = [json.loads(line) for line in open(sys.argv[sys.argv.index("--workload") + 1])]
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    if line.strip() == "continuous":
        sys.exit(3)
    answers = [{"end": 9.0, "deliveries": [[n + 1.0, 1] for n in range(row["max_new"])]}
               for row in rows]
    print(json.dumps({"requests": answers, "notes": ["slow"]}), flush=True)
"""


def test_transformers_is_asked_for_one_system_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of turns is ours; a child that dies is an error, not an endless wait."""
    script = tmp_path / "compare.py"
    script.write_text(textwrap.dedent(COMPARE))
    monkeypatch.setattr(
        launch, "command", lambda part, arguments: [sys.executable, str(script), *arguments]
    )
    with Transformers(
        "some/model", [WorkloadRequest("a", (1,), 3), WorkloadRequest("b", (2,), 1)]
    ) as transformers:
        run = transformers.run("static", 1)
        assert (run.system, run.turn, run.notes) == (SYSTEMS["static"], 1, ["slow"])
        assert [record.output_tokens for record in run.requests] == [3, 1]
        assert all(record.is_complete and record.end == 9.0 for record in run.requests)
        with pytest.raises(LaunchError, match="exit code 3"):
            transformers.run("continuous", 1)


def test_progress_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log gets a line now and then, and the last word at the end."""
    out = io.StringIO()
    with Progress("run", 2, 10, out) as progress:
        monkeypatch.setattr(progress, "_interval", -1.0)
        progress.advance(4, False)
        monkeypatch.undo()
        progress.advance(6, True)
        progress.advance(0, True)
    shown = [line.rpartition(",")[0] for line in out.getvalue().splitlines()]
    assert shown == [
        "run: 0 of 2 requests, 4 of 10 tokens",
        "run: 2 of 2 requests, 10 of 10 tokens",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_stays_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of lines would push the report of the last run out of the scrollback."""
    out = Terminal()
    with Progress("run", 2, 10, out) as progress:
        monkeypatch.setattr(progress, "_interval", -1.0)
        for _ in range(9):
            progress.advance(1, False)
        progress.advance(1, True)
        progress.advance(0, True)
    assert out.getvalue().count("\n") == 1
    *_, last = out.getvalue().split("\r")
    assert last.startswith("run: 2 of 2 requests, 10 of 10 tokens")
