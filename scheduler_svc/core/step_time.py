"""How much prompt a step computes, so that nobody waits long for the tokens that it samples.

A step with decoding rows aims at a time. Prompts get what the decoding rows leave of it, at the
speed that results have reported: a step's measured time is an input of the core, like its tokens,
so the same results give the same plans. Two rules let a step take longer than the aim:

- up to twice the aim, where its base cost, which it has however few tokens it computes, would
  otherwise be more than 4 % of it: prompts would lose throughput;
- up to twice what its decoding rows cost, where that is more than half of the aim: prompts would
  starve.

In a step without decoding rows the first prompt may take all of max_batch_tokens; others join it
within the aim, for whoever's prompt ends there waits for a first token. So the first tokens of a
burst come one after the other, not all at the end of one long step. The price: a newcomer waits
for such steps in flight, as it would wait for that prompt anyway (by priority, it need not).

The estimated cost of a step is base + per token + per key read; a token reads the keys of all
tokens before it (sliding windows are ignored). Each result corrects the three, above all what
dominated the expected cost and is known least. So steps that only decode teach the base, prompts
the cost of a token, long prompts that of a key; a part that a step says nothing about keeps its
value, and all follow when the device slows down or speeds up.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from protos.plan import Int32

# by kind of device, milliseconds: what a step aims at unless target_step_ms says otherwise
TARGET_STEP_MS: Final = {"cpu": 600.0, "cuda": 50.0, "mps": 200.0}

MIN_PROMPT_TOKENS: Final = 16  # of a step that computes prompts at all, whatever they cost
BASE_SHARE: Final = 1 / 25  # of a step's time that its base cost should be at most
MOST_STRETCH: Final = 2.0  # times the aim, for the sake of BASE_SHARE
# before the first result: base and key cost as much as so many tokens, the aim as so many
FIRST_BASE: Final = 16.0
FIRST_KEY: Final = 1 / 4096
FIRST_TOKENS: Final = 64.0
# relative variances: of base, token and key before the first result; of a measured time; and of
# the change from step to step of a part that is all of the cost
FIRST_DOUBTS: Final = (4.0, 4.0, 1.0)
NOISE: Final = 0.01
DRIFT: Final = 0.01
MOST_SLOWER: Final = 4.0  # times what was expected; beyond that it may be a pause of the machine
LEAST_FACTOR: Final = 0.1  # of a part's cost, after one result


def aim_of(target_step_ms: float | None, device: str) -> float:
    """Seconds that a step should take on this device; 0 = as long as it takes."""
    if target_step_ms is None:
        target_step_ms = TARGET_STEP_MS.get(device.partition(":")[0], 0.0)
    return target_step_ms / 1000


class StepCost:
    """Estimates what steps cost on `device`, in seconds; `aim` is what one should take, 0 = no
    matter.

    A Kalman filter with a diagonal covariance, in relative terms.
    """

    def __init__(self, aim: float, device: str = "") -> None:
        self.aim = aim
        self.device = device
        self.per_token = max(aim, 1e-3) / FIRST_TOKENS
        self.base = FIRST_BASE * self.per_token
        self.per_key = FIRST_KEY * self.per_token
        self._doubts: tuple[float, ...] = ()  # of base, token and key

    def of(self, num_tokens: float, num_keys: float) -> float:
        return self.base + self.per_token * num_tokens + self.per_key * num_keys

    def learn(self, num_new_tokens: Int32, ends: Int32, seconds: float) -> None:
        """Takes in how long a step took that computed so many tokens of each row [R], up to
        those ends [R]."""
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
    """The time that is left for prompts in a step that is being decided."""

    def __init__(self, cost: StepCost, decoding: Int32) -> None:
        """`decoding` [R]: the rows that decode in it, by the tokens that they have after it."""
        self._cost = cost
        decodes = cost.of(len(decoding), int(decoding.sum(dtype=np.int64)))
        stretched = min(cost.base / BASE_SHARE, MOST_STRETCH * cost.aim)
        self._seconds = max(cost.aim, stretched, 2 * decodes) - decodes
        self._is_first = True
        self._decodes = len(decoding) > 0

    def cut(self, wanted: int, num_computed: int) -> int:
        """How many of the wanted tokens a prompt gets after its `num_computed`; 0 = it waits."""
        if wanted == 1 or (self._is_first and not self._decodes):
            return wanted  # one token: an answer that goes on where it was interrupted
        per_token = self._cost.per_token + self._cost.per_key * num_computed
        # the positive root of per_key / 2 * n^2 + per_token * n = seconds
        under_root = per_token * per_token + 2 * self._cost.per_key * self._seconds
        fits = int(2 * self._seconds / (per_token + math.sqrt(under_root)))
        if fits >= min(wanted, MIN_PROMPT_TOKENS):
            return min(wanted, fits)
        return min(wanted, MIN_PROMPT_TOKENS) if self._is_first else 0

    def spend(self, num_tokens: int, num_computed: int) -> None:
        """A prompt got so many tokens after its `num_computed`."""
        self._is_first = False
        keys = num_tokens * (num_computed + num_tokens / 2)
        spent = self._cost.per_token * num_tokens + self._cost.per_key * keys
        self._seconds = max(0.0, self._seconds - spent)


def keys_read(num_new_tokens: Int32, ends: Int32) -> npt.NDArray[np.float64]:
    """By the new tokens of each row, up to those ends: each reads itself and all before it. [R]"""
    keys: npt.NDArray[np.float64] = num_new_tokens * (ends - (num_new_tokens - 1) / 2)
    return keys
