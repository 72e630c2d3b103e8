"""How much prompt a step may compute, so that whoever is waiting for its tokens waits not too long.

A step that decodes aims at a time. Its prompts get what its decoding rows leave of that, at the
speed that results have reported: the measured time of a step is an input of the core, as its tokens
are, so equal results give equal plans. Two things may stretch a step. Up to twice the aim, where it
would otherwise spend more than 4 % of its time on what any step costs, however few tokens
it has: prompts would lose throughput. And up to twice what its decoding rows cost, where those come
near the aim or pass it by themselves: prompts would starve.

In a step that decodes nothing, the first prompt may take all of max_batch_tokens. Others join it
within the aim, for one that is completed waits for its first token: a burst gets its first tokens
one after the other, not all at the end of one long step.

The cost of a step is taken to be base + per token + per key read, where a token reads the keys of
all tokens before it (windows are not regarded). Each result moves the three towards agreeing with
it: most that which was most of the predicted cost and is known least. So steps that only decode
teach what a step costs at least, prompts what a token costs, long prompts what keys cost; none of
it is forgotten meanwhile, and all of it follows when the device becomes slower or faster.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from protos.plan import Int32

# by kind of device, milliseconds: what a step aims at unless target_step_ms says otherwise
TARGET_STEP_MS: Final = {"cpu": 500.0, "cuda": 50.0, "mps": 200.0}

MIN_PROMPT_TOKENS: Final = 16  # of a step that computes prompts at all, whatever they cost
BASE_SHARE: Final = 1 / 25  # of a step's time that its base cost should be at most
MOST_STRETCH: Final = 2.0  # times the aim, for the sake of BASE_SHARE
# before the first result: what base and key cost in tokens, and tokens of a step as long as the aim
FIRST_BASE: Final = 16.0
FIRST_KEY: Final = 1 / 4096
FIRST_TOKENS: Final = 64.0
# relative variances: of base, token and key before the first result, of a measured time, and what
# a part that is all of a step's cost may have changed since the step before
FIRST_DOUBTS: Final = (4.0, 4.0, 1.0)
NOISE: Final = 0.01
DRIFT: Final = 0.01
MOST_SLOWER: Final = 4.0  # times the estimate; what is beyond may be a pause of the machine
LEAST_FACTOR: Final = 0.1  # by which one result makes a part cheaper


def aim_of(target_step_ms: float | None, device: str) -> float:
    """Seconds that a step should take on this device; 0 = as long as it takes."""
    if target_step_ms is None:
        target_step_ms = TARGET_STEP_MS.get(device.partition(":")[0], 0.0)
    return target_step_ms / 1000


class StepCost:
    """The estimated cost of steps, in seconds; `aim` is what a step should take, 0 = no matter.

    A Kalman filter without correlations, in relative terms.
    """

    def __init__(self, aim: float) -> None:
        self.aim = aim
        self.per_token = aim / FIRST_TOKENS
        self.base = FIRST_BASE * self.per_token
        self.per_key = FIRST_KEY * self.per_token
        self._doubts: tuple[float, ...] = ()  # of base, token and key

    def of(self, num_tokens: float, num_keys: float) -> float:
        return self.base + self.per_token * num_tokens + self.per_key * num_keys

    def learn(self, num_new_tokens: Int32, ends: Int32, seconds: float) -> None:
        """Takes in that a step of these tokens [R], that end there in their rows [R], took so
        long."""
        if not self.aim:
            return
        num_tokens = int(num_new_tokens.sum())
        num_keys = int(keys_read(num_new_tokens, ends).sum())
        expected = self.of(num_tokens, num_keys)
        seconds = max(seconds, 1e-6)  # a clock that stands still
        if not self._doubts:
            factors = [seconds / expected] * 3
            self._doubts = FIRST_DOUBTS
        else:
            shares = (
                self.base / expected,
                self.per_token * num_tokens / expected,
                self.per_key * num_keys / expected,
            )
            difference = min(seconds / expected, MOST_SLOWER) - 1
            blame = [
                doubt * share * share for doubt, share in zip(self._doubts, shares, strict=True)
            ]
            total = sum(blame) + NOISE
            factors = [
                max(LEAST_FACTOR, 1 + difference * part / total / share) if share else 1.0
                for part, share in zip(blame, shares, strict=True)
            ]
            self._doubts = tuple(
                doubt * (1 - part / total) + DRIFT * share
                for doubt, part, share in zip(self._doubts, blame, shares, strict=True)
            )
        self.base *= factors[0]
        self.per_token *= factors[1]
        self.per_key *= factors[2]


class PromptTime:
    """What is left for prompts of the time of a step that is being decided."""

    def __init__(self, cost: StepCost, decoding: Int32) -> None:
        """`decoding` [R]: tokens after the step of the rows that decode in it."""
        self._cost = cost
        decodes = cost.of(len(decoding), int(decoding.sum(dtype=np.int64)))
        stretched = min(cost.base / BASE_SHARE, MOST_STRETCH * cost.aim)
        self._seconds = max(cost.aim, stretched, 2 * decodes) - decodes
        self._is_first = True
        self._decodes = len(decoding) > 0

    def cut(self, wanted: int, num_computed: int) -> int:
        """How many of so many tokens a prompt may have that stands there; 0 = it waits."""
        if self._is_first and not self._decodes:
            return wanted
        per_token = self._cost.per_token + self._cost.per_key * num_computed
        # the positive root of per_key / 2 * n^2 + per_token * n = seconds
        under_root = per_token * per_token + 2 * self._cost.per_key * self._seconds
        fits = int(2 * self._seconds / (per_token + math.sqrt(under_root)))
        if fits >= min(wanted, MIN_PROMPT_TOKENS):
            return min(wanted, fits)
        return min(wanted, MIN_PROMPT_TOKENS) if self._is_first else 0

    def spend(self, num_tokens: int, num_computed: int) -> None:
        """So many tokens of a prompt that stands there are in the step."""
        self._is_first = False
        keys = num_tokens * (num_computed + num_tokens / 2)
        spent = self._cost.per_token * num_tokens + self._cost.per_key * keys
        self._seconds = max(0.0, self._seconds - spent)


def keys_read(num_new_tokens: Int32, ends: Int32) -> npt.NDArray[np.float64]:
    """By so many tokens that end there, each reading what is before it and itself. [R]"""
    keys: npt.NDArray[np.float64] = num_new_tokens * (ends - (num_new_tokens - 1) / 2)
    return keys
