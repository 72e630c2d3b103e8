"""What a run leaves behind: the times of every request and of every step, and how to keep them.

Moments are seconds since the run's start, on the client's clock. Pure values; what they add up to
is figures.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestRecord:
    """One request, as its client saw it; the server's own times beside it."""

    id: str
    prompt_tokens: int
    max_new: int
    due: float  # when the arrivals wanted it sent
    priority: int = 0
    sent: float = 0.0
    end: float = 0.0
    # (moment, tokens that came with it): one per message
    deliveries: list[tuple[float, int]] = field(default_factory=list)
    error: str | None = None
    cached_tokens: int = 0
    queued_seconds: float = 0.0  # accepted to first scheduled, by the server
    prefill_seconds: float = 0.0  # first scheduled to first token, by the server
    preemptions: int = 0

    @property
    def output_tokens(self) -> int:
        return sum(count for _, count in self.deliveries)

    @property
    def is_complete(self) -> bool:
        """It got exactly what it asked for."""
        return self.error is None and self.output_tokens == self.max_new

    @property
    def first(self) -> float | None:
        """The moment of its first token."""
        return self.deliveries[0][0] if self.deliveries else None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the server: protos/admin.proto describes the fields."""

    start: float
    seconds: float
    device_seconds: float
    num_tokens: int
    num_prefilling: int
    num_decoding: int
    num_finished: int
    num_running: int
    num_pending: int
    chunks_used: int
    chunks_total: int
    utilisation: float

    @property
    def rows(self) -> int:
        """Rows computed."""
        return self.num_prefilling + self.num_decoding + self.num_finished

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(slots=True)
class Run:
    """One system, once over the whole workload."""

    system: str  # chairlift, transformers static, …
    turn: int
    requests: list[RequestRecord]
    steps: list[StepRecord] = field(default_factory=list)
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0
    notes: list[str] = field(default_factory=list)  # what a reader must know

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` is its inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Run:
        """Ignores what a newer version has added."""
        requests = []
        for row in kept["requests"]:
            record = RequestRecord(**_known(RequestRecord, row))
            record.deliveries = [(moment, count) for moment, count in record.deliveries]
            requests.append(record)
        steps = [StepRecord(**_known(StepRecord, row)) for row in kept.get("steps", ())]
        return cls(**{**_known(cls, kept), "requests": requests, "steps": steps})


def _known(kind: type, row: Mapping[str, Any]) -> dict[str, Any]:
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return {name: value for name, value in row.items() if name in names}
