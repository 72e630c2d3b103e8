"""How long prompts and answers of a synthetic workload are: three shapes, one small notation.

64              always 64
uniform:16-343  every length from 16 to 343 equally likely
skewed:8-256    log-normal, as real traffic is: many short, few long; 95 % of it lies between
                8 and 256, and what does not is drawn again
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

NOTATION = "N, uniform:A-B or skewed:A-B"

_RANGE = re.compile(r"(uniform|skewed):(\d+)-(\d+)")
_SPREAD = 1.959963984540054  # standard deviations that hold 95 % of a normal distribution


class NotALength(ValueError):
    """The text is none of the notations; `str()` says what is allowed."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution over the whole numbers from `shortest` to `longest`."""

    shape: str  # fixed, uniform, skewed
    shortest: int
    longest: int

    def __str__(self) -> str:
        if self.shape == "fixed":
            return str(self.shortest)
        return f"{self.shape}:{self.shortest}-{self.longest}"

    def draw(self, source: random.Random) -> int:
        """One length."""
        if self.shape == "fixed":
            return self.shortest
        if self.shape == "uniform":
            return source.randint(self.shortest, self.longest)
        low, high = math.log(self.shortest), math.log(self.longest)
        while True:
            length = round(source.lognormvariate((low + high) / 2, (high - low) / 2 / _SPREAD))
            if self.shortest <= length <= self.longest:
                return length


def parse_lengths(text: str) -> Lengths:
    """Raises NotALength."""
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return Lengths("fixed", int(text), int(text))
    found = _RANGE.fullmatch(text)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        raise NotALength(f"{text!r} is no length; allowed: {NOTATION}, with 1 <= A <= B")
    return Lengths(found[1], int(found[2]), int(found[3]))
