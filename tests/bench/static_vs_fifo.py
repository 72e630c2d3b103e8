"""Static batches against continuous batching, on our own engine.

`python -m tests.bench.static_vs_fifo --out build/bench`. The same kernels and the same KV bytes;
only `scheduler_type` differs. Each measurement is one `chairlift bench --serve` and one JSON file
in --out; existing files are not measured again, so that a long comparison can be made in pieces,
and the table printed from what exists.

    workloads  mixed    tests/workloads/mixed.jsonl: prompts 16-343, outputs 8-256, skewed
               equal    tests/workloads/equal.jsonl: 64 and 64, always
               spread   made up: prompts 16-128, outputs 10-500, skewed
               answers  the same outputs, prompts 8-32: decoding is nearly all the work
    loads      offline  all requests at once
               poisson  at 0.9 times fifo's offline requests per second
    turns      static, fifo, static, fifo …; medians, ratios by turn
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from client.bench.figures import Figures
from client.bench.report_html import page
from client.bench.report_text import seconds
from client.bench.result import Result, read_result
from tests.bench.rows_picture import rows_picture

WORKLOADS = Path(__file__).resolve().parents[1] / "workloads"
POLICIES = ("static", "fifo")
WORK = {
    "mixed": ["--workload", str(WORKLOADS / "mixed.jsonl")],
    "equal": ["--workload", str(WORKLOADS / "equal.jsonl")],
    "spread": ["--prompt", "skewed:16-128", "--output", "skewed:10-500", "--requests", "128"],
    "answers": ["--prompt", "skewed:8-32", "--output", "skewed:10-500", "--requests", "128"],
}
LOADS = ("offline", "poisson")
POISSON_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table: a figure, its format, and the published value."""

    title: str
    value: Callable[[Figures], float | None]
    shown: Callable[[float], str]
    published: Callable[[str], str]  # by workload


def plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(value: float) -> str:
    return f"{value:.0%}"


def unless_equal(text: str) -> Callable[[str], str]:
    """All published figures but one are for mixed lengths."""
    return lambda workload: "" if workload == "equal" else text


LINES = (
    Line(
        "output tokens per second",
        lambda f: f.output_tokens_per_second,
        plain,
        lambda w: "580 → 620 (+7 %)" if w == "equal" else "420 → 1,350 (3.2×)",  # noqa: RUF001
    ),
    Line(
        "end to end, p50",
        lambda f: f.e2e.p50 if f.e2e else None,
        seconds,
        unless_equal("450 → 85 ms (−81 %)"),  # noqa: RUF001
    ),
    Line(
        "end to end, p99",
        lambda f: f.e2e.p99 if f.e2e else None,
        seconds,
        unless_equal("2.8 s → 420 ms (−85 %)"),  # noqa: RUF001
    ),
    Line("most requests at once", lambda f: f.most_at_once, plain, unless_equal("32 → 96 (3×)")),  # noqa: RUF001
    Line("KV memory use, mean", lambda f: f.kv_use, percent, unless_equal("45 % → 82 %")),
    Line("KV memory use, peak", lambda f: f.kv_use_peak, percent, lambda w: ""),
    Line("steps", lambda f: f.num_steps, plain, lambda w: ""),
    Line("rows computed", lambda f: f.row_steps, plain, lambda w: ""),
    Line("tokens computed", lambda f: f.tokens_computed, plain, lambda w: ""),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.table:
        for workload in options.workloads:
            for load in options.loads:
                for turn in range(options.turns):
                    for policy in POLICIES:
                        measure(options, workload, load, policy, turn)
    for workload in options.workloads:
        for load in options.loads:
            found = {policy: turns(options.out, workload, load, policy) for policy in POLICIES}
            if all(found.values()):
                print(f"\n{table(workload, load, found)}")
                firsts = [found[policy][0] for policy in POLICIES]
                name = options.out / f"{workload}-{load}"
                name.with_suffix(".html").write_text(page(firsts))
                name.with_suffix(".svg").write_text(rows_picture(firsts))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.static_vs_fifo",
        description="Measure static batches against continuous batching; print the table.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--workloads", nargs="+", choices=list(WORK), default=list(WORK))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, help="only the first N of each workload")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--num-blocks", type=int, default=600, help="KV pool of both, in blocks")
    parser.add_argument("--max-requests-per-batch", type=int, default=64, help="of both")
    parser.add_argument("--table", action="store_true", help="measure nothing, print what exists")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, workload: str, load: str, policy: str, turn: int) -> None:
    """Measures one file, unless it exists."""
    path = file_of(options.out, workload, load, policy, turn)
    if path.exists():
        return
    arrivals = "all"
    if load == "poisson":
        offline = turns(options.out, workload, "offline", "fifo")
        if not offline:
            raise SystemExit(f"{workload}: poisson needs the offline measurement of fifo first")
        saturated = statistics.median(figures(result).requests_per_second for result in offline)
        arrivals = f"poisson:{POISSON_SHARE * saturated:.6f}"
    print(f"{path.stem}: {arrivals}", file=sys.stderr, flush=True)
    line = [sys.executable, "-P", "-m", "client", "bench", "--serve", *WORK[workload]]
    line += ["--requests", str(options.requests)] if options.requests else []
    line += ["--arrivals", arrivals, "--seed", str(turn), "--label", policy, "--json", str(path)]
    line += ["--gather"] if load == "offline" else []
    line += ["--server-log", str(path.with_suffix(".log")), "--"]
    line += ["--model", options.model, "--scheduler-type", policy]
    line += ["--num-blocks", str(options.num_blocks)]
    line += ["--max-requests-per-batch", str(options.max_requests_per_batch)]
    done = subprocess.run(line, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SystemExit(f"{path.stem} failed; {path.with_suffix('.log')} may say why")


def file_of(folder: Path, workload: str, load: str, policy: str, turn: int) -> Path:
    return folder / f"{workload}-{load}-{policy}-{turn + 1}.json"


def turns(folder: Path, workload: str, load: str, policy: str) -> list[Result]:
    """The measured turns, in order."""
    found = []
    while (path := file_of(folder, workload, load, policy, len(found))).exists():
        found.append(read_result(path))
    return found


def figures(result: Result) -> Figures:
    return result.figures()["chairlift"]


def table(workload: str, load: str, found: dict[str, list[Result]]) -> str:
    """Markdown. The ratio is fifo's figure over static's."""
    pairs = [
        (figures(static), figures(fifo))
        for static, fifo in zip(found["static"], found["fifo"], strict=False)
    ]
    first = found["fifo"][0]
    lines = [
        f"**{workload}**, {load}: {first.workload}; arrivals {first.arrivals}; "
        f"{len(pairs)} turns; {first.machine.get('processor')}, {first.machine.get('cores')} cores",
        "",
        "| | static | fifo | | published |",
        "|---|---|---|---|---|",
    ]
    for line in LINES:
        values = [(line.value(static), line.value(fifo)) for static, fifo in pairs]
        known = [(a, b) for a, b in values if a is not None and b is not None]
        if known:
            static, fifo = (statistics.median(side) for side in zip(*known, strict=True))
            ratio = statistics.median(b / a for a, b in known if a)
            lines.append(
                f"| {line.title} | {line.shown(static)} | {line.shown(fifo)} "
                f"| {change(ratio)} | {line.published(workload)} |"
            )
    speed, work = throughput_and_work(pairs)
    lines += ["", f"throughput {speed:.2f}×, tokens computed {work:.2f}× fewer: "  # noqa: RUF001
              f"{speed / work - 1:+.0%} apart"]  # fmt: skip
    return "\n".join(lines)


def throughput_and_work(pairs: Sequence[tuple[Figures, Figures]]) -> tuple[float, float]:
    """fifo's output tokens per second over static's; static's tokens computed, prompts included,
    over fifo's."""
    speed = statistics.median(
        fifo.output_tokens_per_second / static.output_tokens_per_second for static, fifo in pairs
    )
    work = statistics.median(
        (static.tokens_computed or 0) / (fifo.tokens_computed or 1) for static, fifo in pairs
    )
    return speed, work


def change(ratio: float) -> str:
    """3.2×, or −81 % for a decrease."""  # noqa: RUF002
    return f"{ratio:.2f}×" if ratio >= 1 else f"−{1 - ratio:.0%}"  # noqa: RUF001


if __name__ == "__main__":
    sys.exit(main())
