"""Synthetic workloads: random prompts, with lengths drawn from a distribution.

64              always 64
uniform:16-343  every length from 16 to 343 with equal probability
skewed:8-256    log-normal like real traffic (many short, few long): 95 % lies between 8 and 256,
                the rest is drawn again
"""

from __future__ import annotations

import math
import random
import re
from argparse import ArgumentTypeError
from dataclasses import dataclass

from client.bench.workload import WorkloadRequest

NOTATION = "N, uniform:A-B or skewed:A-B"

_RANGE = re.compile(r"(uniform|skewed):(\d+)-(\d+)")
_DEVIATIONS = 1.959963984540054  # 95 % of a normal distribution lies within this many


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution over the integers from `shortest` to `longest`; `text` is its notation."""

    text: str
    shortest: int
    longest: int

    def __str__(self) -> str:
        return self.text

    def draw(self, source: random.Random) -> int:
        if self.text.isdecimal():
            return self.shortest
        if self.text.startswith("uniform"):
            return source.randint(self.shortest, self.longest)
        low, high = math.log(self.shortest), math.log(self.longest)
        while True:
            length = round(source.lognormvariate((low + high) / 2, (high - low) / 2 / _DEVIATIONS))
            if self.shortest <= length <= self.longest:
                return length


def parse_lengths(text: str) -> Lengths:
    """Raises argparse.ArgumentTypeError, which names the notation."""
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return Lengths(text, int(text), int(text))
    found = _RANGE.fullmatch(text)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        raise ArgumentTypeError(f"{text!r} is not a length; allowed: {NOTATION}, 1 <= A <= B")
    return Lengths(text, int(found[2]), int(found[3]))


@dataclass(frozen=True, slots=True)
class Recipe:
    """The same recipe and vocabulary give the same requests."""

    num_requests: int
    prompt: Lengths
    output: Lengths
    seed: int
    shared_prefix: int = 0  # tokens in front of each prompt …
    num_prefixes: int = 1  # … drawn from this many prefixes
    num_priorities: int = 1  # priorities are drawn from 0 to this - 1

    def __str__(self) -> str:
        parts = [f"{self.num_requests} requests, prompts {self.prompt}, outputs {self.output}"]
        if self.shared_prefix:
            parts.append(f"behind one of {self.num_prefixes} prefixes of {self.shared_prefix}")
        if self.num_priorities > 1:
            parts.append(f"{self.num_priorities} priorities")
        return ", ".join([*parts, f"seed {self.seed}"])


def make_requests(recipe: Recipe, vocab_size: int) -> list[WorkloadRequest]:
    """Random token ids from 3 on, because the first ids are often special."""
    source = random.Random(recipe.seed)
    ids = range(min(3, vocab_size - 1), vocab_size)
    prefixes = [_tokens(source, ids, recipe.shared_prefix) for _ in range(recipe.num_prefixes)]
    return [
        WorkloadRequest(
            id=str(number),
            prompt=(
                *source.choice(prefixes),
                *_tokens(source, ids, recipe.prompt.draw(source)),
            ),
            max_new=recipe.output.draw(source),
            priority=source.randrange(recipe.num_priorities),
        )
        for number in range(recipe.num_requests)
    ]


def _tokens(source: random.Random, ids: range, count: int) -> list[int]:
    return [source.choice(ids) for _ in range(count)]
