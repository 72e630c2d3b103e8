"""In which order requests are offered a place in a step; all else is shared (decide.py).

fifo: what decodes goes first, then what prefills, then what waits, each in order of arrival.
Running answers never stutter because somebody else's long prompt arrived, and a prefill uses
what the decodes left of the token budget. The price: a new request's first token waits longer
under load than with prefill_first. Its safety margin of 15 % keeps blocks for the decodes that
are running, so that few of them are reset for want of memory.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class Phase(enum.Enum):
    """A class of candidates; within one, order of arrival."""

    DECODING = enum.auto()
    PREFILLING = enum.auto()
    PENDING = enum.auto()


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    phases: tuple[Phase, ...]
    safety_margin: float  # the default


FIFO: Final = Policy("fifo", (Phase.DECODING, Phase.PREFILLING, Phase.PENDING), 0.15)

POLICIES: Final = {policy.name: policy for policy in (FIFO,)}
