"""How many prompt tokens a step computes, so that no row waits long for its next token.

Prompts get what decoding rows leave of a target time, by estimated costs: base + per token + per
key read (a token reads the keys of all tokens before it; sliding windows are ignored). Measured
times are inputs of the core, so equal results give equal plans. A step may take longer than the
target: up to twice, where its base cost would exceed 4 % (else prompts lose throughput); and where
its decoding rows cost more than half the target, up to twice their cost (else prompts starve).

Without decoding rows the first prompt may use all of max_batch_tokens; others join within the
target, as requests whose prompts end there wait for a first token. So the first tokens of a burst
come one by one. The price: a newcomer waits for such steps in flight.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from protos.plan import Int32

# milliseconds by kind of device, unless target_step_ms says otherwise
TARGET_STEP_MS: Final = {"cpu": 600.0, "cuda": 50.0, "mps": 200.0}

MIN_PROMPT_TOKENS: Final = 16  # of a step that computes prompts at all, whatever they cost
BASE_SHARE: Final = 1 / 25  # most of a step's time that its base cost should be
MOST_STRETCH: Final = 2.0  # times the target, for the sake of BASE_SHARE
# before the first result, in tokens' costs: the base, a key, the target
FIRST_BASE: Final = 16.0
FIRST_KEY: Final = 1 / 4096
FIRST_TOKENS: Final = 64.0
# relative variances: of base, token and key costs before the first result; of a measured time; of
# the drift per step of a cost that is the whole time
FIRST_DOUBTS: Final = (4.0, 4.0, 1.0)
NOISE: Final = 0.01
DRIFT: Final = 0.01
MOST_SLOWER: Final = 4.0  # times the expected cost; a longer step may be a pause of the machine
LEAST_FACTOR: Final = 0.1  # one result lowers a cost at most to this share of it


def aim_of(target_step_ms: float | None, device: str) -> float:
    """Seconds that a step should take on this device; 0 = no target."""
    if target_step_ms is None:
        target_step_ms = TARGET_STEP_MS.get(device.partition(":")[0], 0.0)
    return target_step_ms / 1000


class StepCost:
    """Estimated costs on `device` and the target `aim`, in seconds; aim 0 = no target.

    A Kalman filter with a diagonal covariance, in relative terms: each result corrects the least
    certain costs that dominated it, so decode steps teach the base, prompts the cost of a token,
    long prompts that of a key.
    """

    def __init__(self, aim: float, device: str = "") -> None:
        self.aim = aim
        self.device = device
        self.per_token = max(aim, 1e-3) / FIRST_TOKENS
        self.base = FIRST_BASE * self.per_token
        self.per_key = FIRST_KEY * self.per_token
        self._doubts: tuple[float, ...] = ()  # of base, token and key

    def of(self, num_tokens: float, num_keys: float) -> float:
        """Seconds of a step."""
        return self.base + self.per_token * num_tokens + self.per_key * num_keys

    def learn(self, num_new_tokens: Int32, ends: Int32, seconds: float) -> None:
        """Corrects the costs by a step's measured time. num_new_tokens, ends: [R]"""
        if not self.aim:
            return
        costs = self.base, self.per_token, self.per_key
        num_tokens = int(num_new_tokens.sum())
        num_keys = int(keys_read(num_new_tokens, ends).sum())
        expected = self.of(num_tokens, num_keys)
        seconds = max(seconds, 1e-6)  # a clock that stands still
        if not self._doubts:
            factors = [seconds / expected] * 3
            self._doubts = FIRST_DOUBTS
        else:
            work = zip(costs, (1, num_tokens, num_keys), strict=True)
            shares = [cost * amount / expected for cost, amount in work]
            difference = min(seconds / expected, MOST_SLOWER) - 1
            pairs = list(zip(self._doubts, shares, strict=True))
            blame = [doubt * share * share for doubt, share in pairs]
            total = sum(blame) + NOISE
            factors = [
                max(LEAST_FACTOR, 1 + difference * part / total / share) if share else 1.0
                for part, share in zip(blame, shares, strict=True)
            ]
            self._doubts = tuple(
                doubt * (1 - part / total) + DRIFT * share
                for (doubt, share), part in zip(pairs, blame, strict=True)
            )
        changed = [cost * factor for cost, factor in zip(costs, factors, strict=True)]
        self.base, self.per_token, self.per_key = changed


class PromptTime:
    """The time left for prompts in a step being built."""

    def __init__(self, cost: StepCost, decoding: Int32) -> None:
        """decoding [R]: the tokens of the step's decoding rows after it."""
        self._cost = cost
        decodes = cost.of(len(decoding), int(decoding.sum(dtype=np.int64)))
        stretched = min(cost.base / BASE_SHARE, MOST_STRETCH * cost.aim)
        self._seconds = max(cost.aim, stretched, 2 * decodes) - decodes
        self._is_first = True
        self._decodes = len(decoding) > 0

    def cut(self, wanted: int, num_computed: int) -> int:
        """Tokens that a prompt gets of those wanted behind its `num_computed`; 0 = it waits."""
        if wanted == 1 or (self._is_first and not self._decodes):
            return wanted  # one token: an answer resumed after a preemption
        per_token = self._cost.per_token + self._cost.per_key * num_computed
        # the positive root of per_key / 2 * n^2 + per_token * n = seconds
        under_root = per_token * per_token + 2 * self._cost.per_key * self._seconds
        fits = int(2 * self._seconds / (per_token + math.sqrt(under_root)))
        if fits >= min(wanted, MIN_PROMPT_TOKENS):
            return min(wanted, fits)
        return min(wanted, MIN_PROMPT_TOKENS) if self._is_first else 0

    def spend(self, num_tokens: int, num_computed: int) -> None:
        """Deducts the cost of a prompt's tokens behind its `num_computed`."""
        self._is_first = False
        keys = num_tokens * (num_computed + num_tokens / 2)
        spent = self._cost.per_token * num_tokens + self._cost.per_key * keys
        self._seconds = max(0.0, self._seconds - spent)


def keys_read(num_new_tokens: Int32, ends: Int32) -> npt.NDArray[np.float64]:
    """Keys read by each row's new tokens up to its end: their own and all before. [R]"""
    keys: npt.NDArray[np.float64] = num_new_tokens * (ends - (num_new_tokens - 1) / 2)
    return keys
