"""How the guards measure: an optimised way and its plain twin in turns, and the ratio of both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[[], object]
Guard = Callable[..., None]


@pytest.fixture
def guard(benchmark: Any, show: Callable[[str], None], request: pytest.FixtureRequest) -> Guard:
    """guard(fast, plain, at_least): plain takes at least so many times as long as fast.

    The median of the ratios turn by turn: whatever else the machine does meanwhile hits both. The
    fast one is what the table and the JSON of pytest-benchmark tell about; the ratio is in its
    extra_info. Where benchmarks are disabled (`make test`) both just run once.
    """

    def measure(fast: Run, plain: Run, at_least: float, turns: int = 9) -> None:
        seconds: list[float] = []  # of the plain one

        def run_plain() -> None:
            begin = time.perf_counter()
            plain()
            seconds.append(time.perf_counter() - begin)

        benchmark.pedantic(fast, setup=run_plain, rounds=turns, warmup_rounds=1)
        if benchmark.disabled:
            return
        pairs = zip(seconds[-turns:], benchmark.stats.stats.data, strict=True)
        ratio = statistics.median(other / own for other, own in pairs)
        benchmark.extra_info |= {"ratio to the plain twin": ratio, "at least": at_least}
        show(f"{request.node.name}: {ratio:.2f} times as fast (at least {at_least:g})")
        assert ratio >= at_least

    return measure
