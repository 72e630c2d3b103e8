"""The order in which requests are offered a place in a step, and the safety margin.

fifo: decodes, then prefills, then pending requests, each by arrival. Running answers never stutter
for another's long prompt. The price: later first tokens under load. Its margin of 15 % keeps blocks
for running decodes, so that few are preempted; a burst in one step may use a third of it.

prefill_first: prefills, then decodes, so first tokens come early. The price: answers stutter beside
long prompts, and without a margin it fills the memory and preempts.

priority: as fifo, but by (priority, arrival), lower first; `AGING` arrivals outweigh one step of
priority, which bounds starvation. A more urgent request preempts less urgent ones (overtaking.py).

static: the baseline of padded generation, batch after batch (static_batches.py), for comparison
only.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from scheduler_svc.core.request import Request

AGING: Final = 1000  # later arrivals of priority p that may overtake a request of priority p + 1


class Phase(enum.Enum):
    """A class of candidates for a step."""

    DECODING = enum.auto()
    PREFILLING = enum.auto()
    PENDING = enum.auto()


@dataclass(frozen=True, slots=True)
class Policy:
    """A scheduler_type."""

    name: str
    phases: tuple[Phase, ...]  # in order
    safety_margin: float  # the default, a share of the blocks
    by_priority: bool = False

    def urgency(self, request: Request) -> int:
        """Lower goes first, then the lower ticket; constant, so that queues stay sorted."""
        return request.priority * AGING + request.ticket if self.by_priority else request.ticket


FIFO: Final = Policy("fifo", (Phase.DECODING, Phase.PREFILLING, Phase.PENDING), 0.15)
PREFILL_FIRST: Final = Policy(
    "prefill_first", (Phase.PREFILLING, Phase.DECODING, Phase.PENDING), 0.0
)
PRIORITY: Final = Policy(
    "priority", (Phase.DECODING, Phase.PREFILLING, Phase.PENDING), 0.2, by_priority=True
)
STATIC: Final = Policy("static", (), 0.0)

POLICIES: Final = {policy.name: policy for policy in (FIFO, PREFILL_FIRST, PRIORITY, STATIC)}
