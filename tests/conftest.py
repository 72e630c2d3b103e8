"""What all tests share: a place for figures that a run should show, captured or not, and how
Hypothesis draws its examples.

By default it draws the same ones in every run, so that no run is red by chance.
`HYPOTHESIS_PROFILE=explore` draws new ones, many more where a test does not say how many; on
failure it prints how to see the same again, and keeps the example in .hypothesis.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

import pytest

with contextlib.suppress(ImportError):  # a machine that only runs tests/gpu may lack it
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True, database=None)
    settings.register_profile("explore", max_examples=2000, print_blob=True, deadline=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# A shell that starts this in the background has SIGINT ignored, and children would inherit that:
# tests that press Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def show(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Takes lines to print behind the results of the run, from whatever process runs the test."""
    return lambda line: request.node.user_properties.append(("figure", line))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    lines = [
        value
        for report in reports
        for name, value in report.user_properties
        if name == "figure" and report.when == "call"
    ]
    if lines:
        terminalreporter.section("figures")
        for line in lines:
            terminalreporter.write_line(str(line))
