"""`chairlift bench`: its options, and what it prints and writes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from client.bench.arrivals import NOTATION as ARRIVALS
from client.bench.arrivals import parse_arrivals
from client.bench.measure import COMPARED, SYNTHETIC_REQUESTS, Settings, measure
from client.bench.report_html import page
from client.bench.report_text import report
from client.bench.result import NotAResult, Result, read_result
from client.bench.synthetic import NOTATION as LENGTHS
from client.bench.synthetic import parse_lengths
from client.bench.workload import BadWorkload
from client.commands.options import add_server_options
from client.processes.launch import LaunchError
from client.terminal.streams import print_error, printable

_DESCRIPTION = """\
Replay a workload over gRPC against a running server, or against a temporary one (--serve), and
report throughput and latency. Every request is greedy and gets exactly the tokens it requests.
Without --workload, requests are random tokens: see --prompt, --output and --seed.
"""
_EXAMPLES = """\
examples:
  chairlift bench --serve --workload tests/workloads/mixed.jsonl --html mixed.html
  chairlift bench --prompt skewed:16-343 --output skewed:8-256 --arrivals poisson:0.5
  chairlift bench --serve --workload w.jsonl --compare transformers --turns 3 -- --num-blocks 2000
  chairlift bench --report static.json fifo.json --html both.html
"""


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="measure throughput and latency on a workload",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_workload_options(parser.add_argument_group("workload"))
    add = parser.add_argument_group("measurement").add_argument
    add("--turns", **_number("repeat N times, systems in turns, and report medians", default=1))
    text = "also run transformers: padded batches of 16, its continuous batching, or both"
    add("--compare", choices=list(COMPARED), help=text)
    text = "CPU threads of transformers (default: torch's choice)"
    add("--compare-threads", type=int, default=0, metavar="N", help=text)
    add("--warm", action="store_true", help="keep the prefix cache of earlier requests")
    text = "keep the server busy while the first requests arrive, so that they start together"
    add("--gather", action="store_true", help=text)
    text = "verify up to K guessed tokens per request and step (default: 0)"
    add("--speculate", type=_count, default=0, metavar="K", help=text)
    add("--slo-ttft", type=float, metavar="SECONDS", help="goodput: maximum time to first token")
    add("--slo-tpot", type=float, metavar="SECONDS", help="goodput: maximum time per output token")
    add("--slo-e2e", type=float, metavar="SECONDS", help="goodput: maximum time from end to end")
    add = parser.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="FILE", help="write all measurements")
    add("--html", type=Path, metavar="FILE", help="write a page with charts")
    add("--label", default="", help="name of this result in comparisons")
    text = "measure nothing; compare these --json files"
    add("--report", nargs="+", type=Path, metavar="FILE", help=text)
    add_server_options(parser)
    add = parser.add_argument_group("temporary server").add_argument
    add("--serve", action="store_true", help="start a server, and stop it at the end")
    add("--server-log", type=Path, metavar="FILE", help="write the log of --serve to FILE")
    add("server_options", nargs="*", metavar="-- OPTION …", help="options of `chairlift serve`")
    parser.set_defaults(run=run)


def _add_workload_options(group: Any) -> None:
    add = group.add_argument
    text = 'JSON lines {"id", "prompt": [token ids], "max_new"}'
    add("--workload", type=Path, metavar="FILE", help=text)
    text = f"send the first N of the file; without a file, make N (default: {SYNTHETIC_REQUESTS})"
    add("--requests", type=_positive, metavar="N", help=text)
    for name, default in (("prompt", "skewed:16-343"), ("output", "skewed:8-256")):
        text = f"{name} tokens: {LENGTHS} (default: {default})"
        add(f"--{name}", type=parse_lengths, metavar="LENGTHS", default=default, help=text)
    text = "length of a common prefix in front of the prompts (default: 0)"
    add("--shared-prefix", type=int, default=0, metavar="N", help=text)
    add("--prefixes", **_number("number of different prefixes", default=1))
    add("--priorities", **_number("draw priorities from 0 to N - 1", default=1))
    add("--seed", type=int, default=0, metavar="N", help="seed of all random choices (default: 0)")
    text = f"{ARRIVALS} (default: all)"
    add("--arrivals", type=parse_arrivals, metavar="RULE", default="all", help=text)


def _number(text: str, default: int) -> dict[str, Any]:
    note = f"{text} (default: {default})"
    return {"type": _positive, "metavar": "N", "default": default, "help": note}


def run(options: Settings) -> int:
    """Exit code 0 if every request got its tokens, 1 if not, or if nothing could be measured."""
    try:
        return _report(options) if options.report else _measure(options)
    except (BadWorkload, NotAResult, OSError) as error:
        print_error(error)
        return 1


def _report(options: Settings) -> int:
    results = [read_result(path) for path in options.report]
    labels = [result.label for result in results]
    for result, path in zip(results, options.report, strict=True):
        if labels.count(result.label) > 1:
            result.label = f"{result.label} ({path})"
    _show(results, options.html)
    return 0


def _measure(options: Settings) -> int:
    if options.server_options and not options.serve:
        raise LaunchError(f"{' '.join(options.server_options)!r} needs --serve before it")
    for path in (options.json, options.html):
        if path is not None and not path.parent.is_dir():  # reported before the measurement
            raise NotADirectoryError(f"{path} cannot be written: {path.parent} is no folder")
    result = measure(options)
    _show([result], options.html)
    if options.json is not None:
        result.write(options.json)
    return int(any(figures.num_failed for figures in result.figures().values()))


def _show(results: Sequence[Result], html: Path | None) -> None:
    print(printable(report(results), sys.stdout), flush=True)
    if html is not None:
        html.write_text(page(results), encoding="utf-8")


def _count(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: an integer from 1 on")
    return int(text)
