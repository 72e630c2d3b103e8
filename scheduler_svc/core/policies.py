"""In which order requests are offered a place in a step; all else is shared (decide.py).

fifo: what decodes goes first, then what prefills, then what waits, each in order of arrival.
Running answers never stutter because somebody else's long prompt arrived, and a prefill uses
what the decodes left of the token budget. The price: a new request's first token waits longer
under load than with prefill_first. Its safety margin of 15 % keeps blocks for the decodes that
are running, so that few of them are preempted for want of memory; a burst that joins in one step
may use a third of it.

prefill_first: what prefills goes first, so a prompt that was begun is finished as fast as the
token budget allows, and first tokens come early. The price: running answers stutter beside long
prompts. No margin: it fills the memory, and preempts when it was too greedy.

priority: by (priority, arrival), lower first, among those that decode, then among those that
prefill, then among those that wait. A more urgent waiting request preempts the fewest less urgent
running ones that make room for it, and joins whatever the margin (overtaking.py); under 10 % free
blocks the least urgent is swapped out. Its margin of 20 % is wider than those 10 %: what was
swapped out does not come back at once (hysteresis).
`AGING` arrivals outweigh one step of priority, which bounds how long anybody starves.

static: the classic baseline, as padded generation does it: a batch is admitted whole, as many as
there are rows and pages for, with pages for prompt + max_tokens reserved; all its prompts are
computed before anybody decodes; finished rows are computed on until the last of the batch has
ended; only then comes the next batch. Here for comparison; nobody should serve with it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from scheduler_svc.core.request import Request

AGING: Final = 1000  # later arrivals of priority p that may overtake a request of priority p + 1


class Phase(enum.Enum):
    """A class of candidates."""

    DECODING = enum.auto()
    PREFILLING = enum.auto()
    PENDING = enum.auto()


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    phases: tuple[Phase, ...]
    safety_margin: float  # the default
    by_priority: bool = False

    def urgency(self, request: Request) -> int:
        """Lower goes first; never changes, so a queue can be kept in order. Ticket if equal."""
        return request.priority * AGING + request.ticket if self.by_priority else request.ticket


FIFO: Final = Policy("fifo", (Phase.DECODING, Phase.PREFILLING, Phase.PENDING), 0.15)
PREFILL_FIRST: Final = Policy(
    "prefill_first", (Phase.PREFILLING, Phase.DECODING, Phase.PENDING), 0.0
)
PRIORITY: Final = Policy(
    "priority", (Phase.DECODING, Phase.PREFILLING, Phase.PENDING), 0.2, by_priority=True
)
STATIC: Final = Policy("static", (), 0.0)  # see static_batches.py

POLICIES: Final = {policy.name: policy for policy in (FIFO, PREFILL_FIRST, PRIORITY, STATIC)}
