"""Skips where there is no GPU, and writes RESULTS.md where there was one.

Warnings are no errors here: torch and transformers of the GPU's own environment may be others than
those that the other tests run with, and a deprecation must not cost a lent GPU's time.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch

    from tests.gpu import results
    from tests.gpu.card import IS_CUDA
    from tests.gpu.results import Results, Table

_RESULTS = pytest.StashKey[Results]()
_SECONDS = pytest.StashKey[dict[str, float]]()
_HERE = Path(__file__).parent

NewTable = Callable[..., Table]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_RESULTS] = Results()
    config.stash[_SECONDS] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.filterwarnings("default"))
        if IS_CUDA and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """A test's models and pools would be missing in the next one."""
    yield
    if IS_CUDA:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def table(request: pytest.FixtureRequest, show: Callable[[str], None]) -> Iterator[NewTable]:
    """Makes a table of RESULTS.md; it is shown behind the results, too."""
    made: list[Table] = []

    def make(title: str, columns: list[str], note: str = "") -> Table:
        made.append(request.config.stash[_RESULTS].table(title, columns, note))
        return made[-1]

    yield make
    for one in made:
        for line in one.lines():
            show(line)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    begin = time.perf_counter()
    outcome = yield
    if _HERE in item.path.parents:
        part = item.path.stem.removeprefix("test_").replace("_", " ")
        seconds = item.config.stash[_SECONDS]
        seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - begin
    return outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    found = session.config.stash[_RESULTS]
    if not (IS_CUDA and torch.cuda.is_available() and found.tables):
        return
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None
    kinds = ("passed", "failed", "error", "skipped")
    outcome = ", ".join(f"{len(reporter.stats[k])} {k}" for k in kinds if reporter.stats.get(k))
    command = " ".join(["python -m pytest", *config.invocation_params.args])
    results.PATH.write_text(found.text(command, outcome, config.stash[_SECONDS]))
