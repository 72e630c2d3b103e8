"""Arrival processes: when each request of a workload is sent.

all           offline: everything at the start
poisson:RATE  independently of each other, RATE requests per second on average
bursts:N/T    N at once, every T seconds
"""

from __future__ import annotations

import random
import re
from argparse import ArgumentTypeError
from dataclasses import dataclass

NOTATION = "all, poisson:RATE or bursts:N/SECONDS"

_NUMBER = r"\d+(?:\.\d*)?|\.\d+"
_POISSON = re.compile(rf"poisson:({_NUMBER})")
_BURSTS = re.compile(rf"bursts:(\d+)/({_NUMBER})")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process; `text` is its notation."""

    text: str
    burst: int  # requests per burst; 0 = all of them
    gap: float  # seconds between bursts, on average if random
    is_random: bool

    def __str__(self) -> str:
        return self.text

    def times(self, count: int, seed: int) -> list[float]:
        """Ascending seconds after the start at which each of `count` requests is sent. [count]"""
        source = random.Random(seed)
        times: list[float] = []
        now = 0.0
        while len(times) < count:
            times += [now] * min(self.burst or count, count - len(times))
            now += source.expovariate(1 / self.gap) if self.is_random else self.gap
        return times


def parse_arrivals(text: str) -> Arrivals:
    """Raises argparse.ArgumentTypeError, which names the notation."""
    if text == "all":
        return Arrivals(text, 0, 0.0, is_random=False)
    poisson, bursts = _POISSON.fullmatch(text), _BURSTS.fullmatch(text)
    if poisson and float(poisson[1]) > 0:
        return Arrivals(text, 1, 1 / float(poisson[1]), is_random=True)
    if bursts and int(bursts[1]) > 0 and float(bursts[2]) > 0:
        return Arrivals(text, int(bursts[1]), float(bursts[2]), is_random=False)
    raise ArgumentTypeError(f"{text!r} is not an arrival; allowed: {NOTATION}, numbers above 0")
