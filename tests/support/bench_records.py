"""Small records whose figures can be worked out by hand."""

from __future__ import annotations

from client.bench.figures import Limits
from client.bench.records import RequestRecord, Run, StepRecord
from client.bench.result import Result


def request(id: str, sent: float, moments: list[float], **more: object) -> RequestRecord:
    """One token at each moment; all that was asked for."""
    return RequestRecord(
        id=id,
        prompt_tokens=10,
        max_new=len(moments),
        due=sent,
        sent=sent,
        end=moments[-1] if moments else sent,
        deliveries=[(moment, 1) for moment in moments],
        **more,  # type: ignore[arg-type]
    )


def step(start: float, seconds: float, **more: float) -> StepRecord:
    values: dict[str, float] = {
        "device_seconds": seconds / 2,
        "num_tokens": 2,
        "num_prefilling": 0,
        "num_decoding": 2,
        "num_finished": 0,
        "num_running": 2,
        "num_pending": 0,
        "chunks_used": 50,
        "chunks_total": 100,
        "utilisation": 0.8,
        **more,
    }
    return StepRecord(start=start, seconds=seconds, **values)  # type: ignore[arg-type]


def two_requests(system: str = "chairlift", turn: int = 0) -> Run:
    """Ten seconds; TTFT 1 and 2 s, end to end 4 and 8 s, 4 and 3 tokens."""
    return Run(
        system,
        turn,
        [
            request("a", 0.0, [1.0, 2.0, 3.0, 4.0], prefill_seconds=0.5),
            request("b", 2.0, [4.0, 7.0, 10.0], preemptions=1, cached_tokens=5),
        ],
        [
            step(0.0, 1.0, num_prefilling=1, num_decoding=0, num_tokens=10, num_running=1),
            step(1.0, 3.0, chunks_used=100, utilisation=0.5, num_finished=1),
        ],
        prefix_queries=20,
        prefix_hits=5,
    )


def result(*runs: Run, label: str = "", limits: Limits | None = None) -> Result:
    return Result(
        workload="two requests",
        arrivals="all",
        seed=3,
        limits=limits or Limits(),
        machine={"processor": "a <fast> one", "cores": 2, "memory_gib": 1.5},
        versions={"chairlift": "0.1.0"},
        commit="abc",
        started="2026-01-01T00:00:00+00:00",
        server={"model": "tiny", "dtype": "float32", "device": "cpu", "version": "0.1.0"},
        runs=list(runs) or [two_requests()],
        label=label,
    )
