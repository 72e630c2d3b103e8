"""Chairlift against transformers, on the workloads of README's table.

`python -m tests.bench.against_transformers --out build/bench`. One `chairlift bench --serve
--compare transformers` and one JSON file per workload; what is there already is not measured again.
The yardstick is transformers' own padded `generate` in batches of 16: the ratio to it is what
carries over to another machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from client.bench.compare import SYSTEMS
from client.bench.result import Result, read_result

WORKLOADS = Path(__file__).resolve().parents[1] / "workloads"
NAMES = ("mixed", "equal", "single", "prefix")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    paths = {
        name: options.out / f"transformers-{name}-{options.weight_format}.json"
        for name in options.workloads
    }
    if not options.table:
        for name, path in paths.items():
            if not path.exists():
                measure(options, name, path)
    print(table({name: read_result(path) for name, path in paths.items() if path.exists()}))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.against_transformers",
        description="Measure Chairlift beside transformers; print the table.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, help="only so many of each workload")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--num-blocks", type=int, default=2500, help="of Chairlift's KV pool")
    parser.add_argument("--weight-format", default="float32", help="of Chairlift")
    parser.add_argument("--table", action="store_true", help="measure nothing, print what is there")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, name: str, path: Path) -> None:
    line = [sys.executable, "-P", "-m", "client", "bench", "--serve"]
    line += ["--workload", str(WORKLOADS / f"{name}.jsonl"), "--compare", "transformers"]
    line += ["--turns", str(options.turns), "--json", str(path)]
    line += ["--html", str(path.with_suffix(".html")), "--label", name]
    line += ["--requests", str(options.requests)] if options.requests else []
    line += ["--server-log", str(path.with_suffix(".log")), "--", "--model", options.model]
    line += ["--num-blocks", str(options.num_blocks), "--weight-format", options.weight_format]
    if subprocess.run(line, stdout=subprocess.DEVNULL, check=False).returncode:
        raise SystemExit(f"{path.stem} failed; {path.with_suffix('.log')} may say why")


def table(found: dict[str, Result]) -> str:
    """Markdown: output tokens per second, how many times those of the others, and seconds."""
    names = ["chairlift", *SYSTEMS.values()]
    lines = [
        "| workload | " + " | ".join(names) + " | × static | × continuous | chairlift, s |",  # noqa: RUF001
        "|---" * (len(names) + 4) + "|",
    ]
    for name, result in found.items():
        figures, ratios = result.figures(), result.ratios()
        cells = [f"{figures[system].output_tokens_per_second:.1f}" for system in names]
        cells += [f"{ratios[system]:.2f}" for system in SYSTEMS.values()]
        cells.append(f"{figures['chairlift'].seconds:.1f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
