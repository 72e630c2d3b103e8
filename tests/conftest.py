"""Shared by all tests: figures to show after a run, whether output is captured or not, and how
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

_FIGURES = pytest.StashKey[list[str]]()

# A shell that starts this in the background has SIGINT ignored, and children would inherit that:
# tests that press Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FIGURES] = []


@pytest.fixture(scope="session")
def show(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Adds a line to the figures printed after the results of the run."""
    return pytestconfig.stash[_FIGURES].append


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.stash[_FIGURES]:
        terminalreporter.section("figures")
        for line in config.stash[_FIGURES]:
            terminalreporter.write_line(line)
