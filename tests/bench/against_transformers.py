"""Chairlift against transformers, on the workloads of docs/benchmarks.md.

`python -m tests.bench.against_transformers --out build/bench`. Each measurement is one `chairlift
bench --serve` and one JSON file in --out; existing files are not measured again, so that a long
comparison can be made in pieces, and the table printed from what exists.

    workloads       tests/workloads/….jsonl, all requests at once; prefix shows what the
                    cache saves, so transformers runs it only if --compare is given
    turns           transformers and the first weight format in one measurement, the other formats
                    directly after it; medians, ratios by turn

The yardstick is transformers' own padded `generate` in batches of 16: the ratio to it carries over
to other machines.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from client.bench.compare import SYSTEMS
from client.bench.figures import Figures
from client.bench.report_text import UNKNOWN, machine_line
from client.bench.result import Result, read_result

WORKLOADS = Path(__file__).resolve().parents[1] / "workloads"
NAMES = ("mixed", "equal", "single", "prefix")
COMPARE = {  # our name → that of `chairlift bench --compare`
    "both": "transformers",
    "static": "transformers-static",
    "continuous": "transformers-continuous",
}

Turn = dict[str, Figures]  # by weight format, and by system for each of SYSTEMS measured


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.table:
        for workload in options.workloads:
            for turn in range(options.turns):
                measure_turn(options, workload, turn)
    found = {workload: turns(options.out, workload) for workload in options.workloads}
    print(table({name: all_of for name, all_of in found.items() if all_of}, options.weight_formats))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.against_transformers",
        description="Measure Chairlift beside transformers; print the table.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--weight-formats", nargs="+", default=["float32", "int8"],
                        help="of Chairlift (default: float32 int8)")  # fmt: skip
    parser.add_argument("--compare", choices=list(COMPARE),
                        help="transformers' batching (default: both; prefix: none)")  # fmt: skip
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, help="only the first N of each workload")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--num-blocks", type=int, default=2500, help="of Chairlift's KV pool")
    parser.add_argument("--table", action="store_true", help="measure nothing, print what exists")
    return parser.parse_args(arguments)


def measure_turn(options: argparse.Namespace, workload: str, turn: int) -> None:
    """Measures the missing files of a turn; transformers with the first format."""
    for weight_format in options.weight_formats:
        path = file_of(options.out, workload, weight_format, turn)
        if not path.exists():
            is_first = not files_of(options.out, workload, turn)
            measure(options, workload, weight_format, path, with_transformers=is_first)


def measure(
    options: argparse.Namespace,
    workload: str,
    weight_format: str,
    path: Path,
    with_transformers: bool,
) -> None:
    """Measures one file. A failed measurement leaves it under another name, for inspection."""
    print(path.stem, file=sys.stderr, flush=True)
    compare = options.compare or ("both" if workload != "prefix" else None)
    unfinished = path.with_suffix(".json.part")
    line = [sys.executable, "-P", "-m", "client", "bench", "--serve"]
    line += ["--workload", str(WORKLOADS / f"{workload}.jsonl"), "--label", weight_format]
    line += ["--requests", str(options.requests)] if options.requests else []
    line += ["--compare", COMPARE[compare]] if compare and with_transformers else []
    line += ["--json", str(unfinished), "--html", str(path.with_suffix(".html"))]
    line += ["--server-log", str(path.with_suffix(".log")), "--", "--model", options.model]
    line += ["--num-blocks", str(options.num_blocks), "--weight-format", weight_format]
    if subprocess.run(line, stdout=subprocess.DEVNULL, check=False).returncode:
        raise SystemExit(f"{path.stem} failed; {path.with_suffix('.log')} may say why")
    unfinished.rename(path)


def file_of(folder: Path, workload: str, weight_format: str, turn: int) -> Path:
    return folder / f"transformers-{workload}-{weight_format}-{turn + 1}.json"


def files_of(folder: Path, workload: str, turn: int) -> dict[str, Path]:
    """The existing files of a turn, by weight format."""
    found = sorted(folder.glob(file_of(folder, workload, "*", turn).name))
    return {path.stem.split("-")[2]: path for path in found}


def turns(folder: Path, workload: str) -> list[dict[str, Result]]:
    """All measured turns in order, each by weight format."""
    found = []
    while files := files_of(folder, workload, len(found)):
        found.append({name: read_result(path) for name, path in files.items()})
    return found


def turn_of(results: dict[str, Result]) -> Turn:
    """Chairlift's figures by weight format, those of the others by system."""
    return {
        (weight_format if system == "chairlift" else system): figures
        for weight_format, result in results.items()
        for system, figures in result.figures().items()
    }


def table(found: dict[str, list[dict[str, Result]]], weight_formats: Sequence[str]) -> str:
    """Markdown: medians of output tokens per second, of the ratios by turn (each format to each
    other system and to the first format), and of seconds; below it the machine."""
    measured = {workload: [turn_of(one) for one in series] for workload, series in found.items()}
    known = {name for series in measured.values() for turn in series for name in turn}
    systems = [system for system in SYSTEMS.values() if system in known]
    names = [*systems, *weight_formats]
    pairs = [(ours, system) for ours in weight_formats for system in systems]
    pairs += [(ours, weight_formats[0]) for ours in weight_formats[1:]]
    head = ["workload", "turns", *names, *(f"{ours} over {other}" for ours, other in pairs)]
    head += [f"{name}, s" for name in weight_formats]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for workload, series in measured.items():
        cells = [workload, str(len(series))]
        cells += [median(1, [speed(turn, name) for turn in series]) for name in names]
        cells += [median(2, [ratio(turn, *pair) for turn in series]) for pair in pairs]
        cells += [median(1, [seconds(turn, name) for turn in series]) for name in weight_formats]
        lines.append(f"| {' | '.join(cells)} |")
    results = [one for series in found.values() for turn in series for one in turn.values()]
    return "\n".join([*lines, "", *sorted({machine_line(result) for result in results})])


def speed(turn: Turn, name: str) -> float | None:
    return turn[name].output_tokens_per_second if name in turn else None


def ratio(turn: Turn, ours: str, other: str) -> float | None:
    mine, theirs = speed(turn, ours), speed(turn, other)
    return mine / theirs if mine and theirs else None


def seconds(turn: Turn, name: str) -> float | None:
    return turn[name].seconds if name in turn else None


def median(digits: int, values: Sequence[float | None]) -> str:
    """The median of the known values."""
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.{digits}f}" if known else UNKNOWN


if __name__ == "__main__":
    sys.exit(main())
