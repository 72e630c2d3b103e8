"""The GPU tests' script, run here in tiny sizes: a mistake in it would cost a GPU's time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.results import PATH, Results

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_the_script_runs_and_leaves_the_results_alone() -> None:
    """It is skipped wherever nobody has a GPU, so nothing else would notice that it is broken."""
    before = PATH.read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider", "-rs"],
        cwd=ROOT,
        env={**os.environ, "CHAIRLIFT_GPU_TESTS_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for title in (
        "Attention of a decode step",
        "Attention of a prefill",
        "A step of Llama-3.1-8B",
        "How busy the device is",
        "Run-ahead stress",
        "Swapping",
        "Sampling from",
        "Penalties, masks and candidates",
        "Masked, scored steps",
        "transformers",
    ):
        assert title in done.stdout
    assert "False |" not in done.stdout  # in the columns "same tokens"
    assert PATH.read_bytes() == before, "figures of a CPU would be taken for a GPU's"


def test_results_name_what_they_were_measured_with() -> None:
    """Figures without versions and command cannot be repeated."""
    results = Results()
    results.table("Speed", ["what", "µs"], "A note.").add("a step", 12)
    text = results.text("python -m pytest tests/gpu", "3 passed", {"steps": 4.2})
    for line in ("| command | `python -m pytest tests/gpu` |", "| outcome | 3 passed |",
                 "## Speed", "A note.", "| a step | 12 |", "| steps | 4 |"):  # fmt: skip
        assert line in text.splitlines()
    for name in ("GPU", "driver", "torch", "triton", "transformers", "date", "commit"):
        assert f"| {name} | " in text
