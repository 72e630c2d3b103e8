"""What prompt-lookup speculation gains and costs: `python -m tests.bench.speculation [--turns 3]`.

One server with the embedded model. In every turn each case runs with each value of `speculate`, one
after the other, with an empty prefix cache:

    copy, alone   the first requests of tests/workloads/copy.jsonl, one at a time
    copy          all of that file at once: answers that repeat their prompts
    mixed         tests/workloads/mixed.jsonl at once, greedy: answers of a small model, which
                  often repeat themselves
    mixed, t=1    the same at temperature 1: answers that repeat nothing

The table gives medians over the turns: output tokens per second, the worker's processor time per
output token, which says more if others use the machine too, draft tokens per output token, and how
many of them were accepted.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from client import AsyncChairlift
from client.bench.machine import describe_machine, versions
from client.bench.workload import WorkloadRequest, read_workload
from tests.bench.long_prompt import cpu_seconds
from tests.support.processes import Server

WORKLOADS: Final = Path(__file__).resolve().parents[1] / "workloads"
SPECULATE: Final = (0, 4, 8)


@dataclass(frozen=True, slots=True)
class Case:
    requests: Sequence[WorkloadRequest]
    at_once: int
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """One case with one value of `speculate`."""

    tokens_per_second: float
    processor_ms: float  # of the worker, per output token
    drafted_share: float  # per output token
    accepted_share: float  # of the draft tokens


def cases(num_requests: int | None, num_alone: int) -> dict[str, Case]:
    copy = read_workload(WORKLOADS / "copy.jsonl")[:num_requests]
    mixed = read_workload(WORKLOADS / "mixed.jsonl")[:num_requests]
    return {
        "copy, alone": Case(copy[:num_alone], 1),
        "copy": Case(copy, len(copy)),
        "mixed": Case(mixed, len(mixed)),
        "mixed, t=1": Case(mixed, len(mixed), 1.0),
    }


async def run(chairlift: AsyncChairlift, worker: int, case: Case, speculate: int) -> Run:
    """Serves the requests of a case, `at_once` of them at a time; `worker` is its process."""
    await chairlift.flush_cache()
    places = asyncio.Semaphore(case.at_once)

    async def complete(seed: int, request: WorkloadRequest) -> tuple[int, int, int]:
        async with places:
            answer = await chairlift.complete(
                request.prompt,
                max_tokens=request.max_new,
                temperature=case.temperature,
                seed=seed,
                top_k=0,
                top_p=1.0,
                ignore_eos=True,
                speculate=speculate,
            )
        usage = answer.usage
        return usage.completion_tokens, usage.drafted_tokens, usage.accepted_tokens

    begin, used = time.perf_counter(), cpu_seconds(worker)
    counts = await asyncio.gather(*[complete(*each) for each in enumerate(case.requests)])
    seconds, used = time.perf_counter() - begin, cpu_seconds(worker) - used
    tokens, drafted, accepted = (sum(column) for column in zip(*counts, strict=True))
    accepted_share = accepted / drafted if drafted else 0.0
    return Run(tokens / seconds, 1000 * used / tokens, drafted / tokens, accepted_share)


async def measure(server: Server, turns: int, wanted: dict[str, Case]) -> None:
    runs: dict[tuple[str, int], list[Run]] = defaultdict(list)
    async with AsyncChairlift(server.address) as chairlift:
        await chairlift.complete([1, 2, 3], max_tokens=4)
        for turn in range(turns):
            for name, case in wanted.items():
                for speculate in SPECULATE:
                    found = await run(chairlift, server.child("worker"), case, speculate)
                    runs[name, speculate].append(found)
                    print(f"turn {turn + 1}: {name}, speculate {speculate}: {found}", flush=True)
    print(f"\n{'case':12}  speculate  tokens/s  of 0's  CPU ms  drafted  accepted")
    for (name, speculate), turned in runs.items():
        rate, used, drafted, accepted = (
            statistics.median(getattr(one, field) for one in turned)
            for field in ("tokens_per_second", "processor_ms", "drafted_share", "accepted_share")
        )
        pairs = zip(turned, runs[name, 0], strict=True)
        ratio = statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in pairs)
        print(
            f"{name:12}  {speculate:9}  {rate:8.1f}  {ratio:6.2f}  {used:6.1f}  "
            f"{drafted:7.2f}  {accepted:8.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, help="only the first N of each file")
    parser.add_argument("--alone", type=int, default=6, help="requests of `copy, alone`")
    parser.add_argument("--cases", nargs="+", help="only these (default: all)")
    options = parser.parse_args()
    chosen = cases(options.requests, options.alone)
    chosen = {name: chosen[name] for name in options.cases or chosen}
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(Path(folder) / "serve.log", wait_seconds=300) as server,
    ):
        print(describe_machine(), versions(), flush=True)
        asyncio.run(measure(server, options.turns, chosen))


if __name__ == "__main__":
    main()
