"""What all tests share: a place for figures that a run should show, captured or not."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

_FIGURES = pytest.StashKey[list[str]]()

# A shell that starts this in the background has SIGINT ignored, and children would inherit that:
# tests that press Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FIGURES] = []


@pytest.fixture(scope="session")
def show(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Takes lines to print behind the results of the run."""
    return pytestconfig.stash[_FIGURES].append


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.stash[_FIGURES]:
        terminalreporter.section("figures")
        for line in config.stash[_FIGURES]:
            terminalreporter.write_line(line)
