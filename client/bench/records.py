"""Records of a run: the times of every request and every step, and their JSON form.

Moments are seconds since the start of the run, on the client's clock. client/bench/figures.py
derives figures from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it, with the server's own times."""

    id: str
    prompt_tokens: int
    max_new: int
    due: float  # when the arrival process wanted it sent
    priority: int = 0
    sent: float = 0.0
    end: float = 0.0
    deliveries: list[tuple[float, int]] = field(default_factory=list)  # (moment, tokens) by message
    error: str | None = None
    cached_tokens: int = 0
    drafted_tokens: int = 0  # guessed and verified
    accepted_tokens: int = 0  # of these, those that were right
    queued_seconds: float = 0.0  # accepted to first scheduled, by the server
    prefill_seconds: float = 0.0  # first scheduled to first token, by the server
    preemptions: int = 0

    @property
    def output_tokens(self) -> int:
        return sum(count for _, count in self.deliveries)

    @property
    def is_complete(self) -> bool:
        """Whether it got exactly the tokens it requested."""
        return self.error is None and self.output_tokens == self.max_new

    @property
    def first(self) -> float | None:
        """The moment of its first token."""
        return self.deliveries[0][0] if self.deliveries else None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the server; protos/admin.proto describes the fields."""

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

    @property
    def pool_share(self) -> float:
        """The share of the KV pool in use, 0 to 1."""
        return self.chunks_used / self.chunks_total if self.chunks_total else 0.0


@dataclass(slots=True)
class Run:
    """One system, once over the whole workload."""

    system: str  # chairlift, transformers static batches, …
    turn: int
    requests: list[RequestRecord]
    steps: list[StepRecord] = field(default_factory=list)
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0
    notes: list[str] = field(default_factory=list)  # caveats for the reader

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """The inverse of dataclasses.asdict; ignores fields that a newer version has added."""
        run = cls(**known(cls, row))
        run.requests = [RequestRecord(**known(RequestRecord, each)) for each in row["requests"]]
        for record in run.requests:
            record.deliveries = [(moment, count) for moment, count in record.deliveries]
        run.steps = [StepRecord(**known(StepRecord, each)) for each in row.get("steps", ())]
        return run


def known(kind: type, row: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `row` that are fields of a dataclass."""
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return {name: value for name, value in row.items() if name in names}
