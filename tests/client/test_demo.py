"""`chairlift demo` as a whole, with the fake engine as its scheduler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from client.commands.demo import _PROMPTS, Span, timeline

ROOT = Path(__file__).resolve().parents[2]

SCHEDULER = """
import signal, sys
from tests.support import fake_server
class Engine(fake_server.FakeEngine):
    def Generate(self, request, context):
        if {fails} and "fruits" in request.chat.messages[-1].content:
            fake_server.fail(context, "INTERNAL no luck")
        yield from super().Generate(request, context)
server, _ = fake_server.start(Engine(), int(sys.argv[sys.argv.index("--port") + 1]))
signal.signal(signal.SIGTERM, lambda *_: server.stop(None))
server.wait_for_termination()
"""
WORKER = "import signal; signal.pause()"


@pytest.mark.parametrize("fails", [False, True])
def test_demo_streams_and_stops(tmp_path: Path, fails: bool) -> None:
    """`make demo` is what a newcomer runs first; it must not claim success that is none."""
    for package, code in (("scheduler_svc", SCHEDULER.format(fails=fails)), ("worker", WORKER)):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / "__main__.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "client", "demo"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    assert done.returncode == int(fails), done.stderr
    for number, (question, _) in enumerate(_PROMPTS, start=1):
        assert f"[{number}] > {question}" in done.stdout
    assert ("no complete answer to 'Name three fruits.'" in done.stderr) == fails
    assert ("Stopped cleanly" in done.stdout) != fails
    assert "Requests waiting" in done.stdout


def test_the_timeline_shows_waiting_and_running() -> None:
    """Without it nobody sees what continuous batching is."""
    spans = [
        Span("long", first=0.0, last=10.0, tokens=40, ending="length"),
        Span("late", first=5.0, last=10.0, tokens=9, ending="stop"),
        Span("never", ending="failed: no luck"),
    ]
    _, heading, long, late, never = timeline(spans)
    assert "over 10.0 s" in heading
    assert (long.count("·"), long.count("█")) == (0, 60)
    assert (late.count("·"), late.count("█")) == (30, 30)
    assert (never.count("·"), never.count("█")) == (0, 0)
    assert "failed: no luck" in never
