"""`chairlift bench`: its options, and the order of what it does."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from client import cli_options
from client.bench import arrivals, lengths
from client.bench.figures import Limits
from client.bench.measure import Settings, measure
from client.bench.report_html import comparison_page, result_page
from client.bench.report_text import comparison, report
from client.bench.result import NotAResult, read_result
from client.bench.workload import BadWorkload
from client.launch import LaunchError
from client.terminal import complain, for_reader

_DESCRIPTION = """\
Replays a workload over gRPC against a running server, or against one of its own (--serve), and
says how fast it was. Every request is greedy and gets exactly the tokens it asks for. Without
--workload the requests are made up from --prompt, --output and --seed.
"""
_EXAMPLES = """\
examples:
  chairlift bench --serve --workload tests/workloads/mixed.jsonl --html mixed.html
  chairlift bench --prompt skewed:16-343 --output skewed:8-256 --arrivals poisson:0.5
  chairlift bench --serve --workload w.jsonl --compare transformers --turns 3 -- --num-blocks 2000
  chairlift bench --report static.json fifo.json --html both.html
"""
_COMPARE = {
    "transformers": ("static", "continuous"),
    "transformers-static": ("static",),
    "transformers-continuous": ("continuous",),
}


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="measure throughput and latency on a workload",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_workload(parser.add_argument_group("workload"))
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--turns", type=_positive, default=1, metavar="N",
        help="measure so often, all systems in turns, and show medians (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--compare", choices=list(_COMPARE),
        help="let transformers do the same work: padded batches of 16, its continuous batching",
    )  # fmt: skip
    group.add_argument("--compare-threads", type=int, default=0, metavar="N",
                       help="CPU threads of transformers (default: torch's choice)")  # fmt: skip
    group.add_argument(
        "--warm", action="store_true", help="keep the prefix cache that earlier requests filled"
    )
    group.add_argument(
        "--gather", action="store_true",
        help="keep the server busy while the first requests arrive, so that it finds them together",
    )  # fmt: skip
    for name, what in (
        ("ttft", "time to first token"),
        ("tpot", "time per output token"),
        ("e2e", "time end to end"),
    ):
        group.add_argument(f"--slo-{name}", type=float, metavar="SECONDS",
                           help=f"goodput: longest {what}")  # fmt: skip
    group = parser.add_argument_group("output")
    group.add_argument("--json", type=Path, metavar="FILE", help="everything that was measured")
    group.add_argument("--html", type=Path, metavar="FILE", help="a page with pictures")
    group.add_argument("--label", default="", help="what a comparison calls this result")
    group.add_argument(
        "--report", nargs="+", type=Path, metavar="FILE",
        help="measure nothing: show these --json files side by side",
    )  # fmt: skip
    cli_options.add_server(parser)
    group = parser.add_argument_group("a server of its own")
    group.add_argument("--serve", action="store_true", help="start one, and stop it at the end")
    group.add_argument("--server-log", type=Path, metavar="FILE", help="keep its log here")
    group.add_argument(
        "server_options", nargs="*", metavar="-- OPTION …", help="as `chairlift serve` takes them"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """0 if every request got its tokens, 1 if not or if nothing could be measured."""
    try:
        return _report(options) if options.report else _measure(options)
    except (BadWorkload, NotAResult, OSError) as error:
        complain(error)
        return 1


def _report(options: argparse.Namespace) -> int:
    results = [read_result(path) for path in options.report]
    labels = [result.label for result in results]
    for result, path in zip(results, options.report, strict=True):
        if labels.count(result.label) > 1:
            result.label = f"{result.label} ({path})"
    text = report(results[0]) if len(results) == 1 else comparison(results)
    print(for_reader(text, sys.stdout))
    if options.html is not None:
        page = result_page(results[0]) if len(results) == 1 else comparison_page(results)
        options.html.write_text(page, encoding="utf-8")
    return 0


def _measure(options: argparse.Namespace) -> int:
    if options.server_options and not options.serve:
        raise LaunchError(f"{' '.join(options.server_options)!r} needs --serve before it")
    for path in (options.json, options.html):
        if path is not None and not path.parent.is_dir():  # better now than after an hour
            raise NotADirectoryError(f"{path} cannot be written: {path.parent} is no folder")
    result = measure(_settings(options))
    print(for_reader(report(result), sys.stdout), flush=True)
    if options.json is not None:
        result.write(options.json)
    if options.html is not None:
        options.html.write_text(result_page(result), encoding="utf-8")
    return int(any(figures.num_failed for figures in result.figures().values()))


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        address=None if options.serve else options.address,
        server_options=tuple(options.server_options),
        server_log=options.server_log,
        timeout=options.timeout,
        workload=options.workload,
        num_requests=options.requests,
        prompt=options.prompt,
        output=options.output,
        shared_prefix=options.shared_prefix,
        num_prefixes=options.prefixes,
        num_priorities=options.priorities,
        seed=options.seed,
        arrivals=options.arrivals,
        turns=options.turns,
        systems=_COMPARE.get(options.compare, ()),
        compare_threads=options.compare_threads,
        is_warm=options.warm,
        gathers=options.gather,
        limits=Limits(options.slo_ttft, options.slo_tpot, options.slo_e2e),
        label=options.label,
    )


def _add_workload(group: Any) -> None:
    group.add_argument(
        "--workload", type=Path, metavar="FILE",
        help='JSON lines {"id", "prompt": [token ids], "max_new"}',
    )  # fmt: skip
    group.add_argument("--requests", type=_positive, metavar="N",
                       help="the first N of the file; without a file: how many (64)")  # fmt: skip
    for name, default in (("prompt", "skewed:16-343"), ("output", "skewed:8-256")):
        group.add_argument(
            f"--{name}", type=_checked(lengths.parse_lengths), metavar="LENGTHS",
            default=lengths.parse_lengths(default),
            help=f"{name} tokens: {lengths.NOTATION} (default: {default})",
        )  # fmt: skip
    group.add_argument("--shared-prefix", type=int, default=0, metavar="N",
                       help="tokens that prompts share at their beginning")  # fmt: skip
    group.add_argument("--prefixes", type=_positive, default=1, metavar="N",
                       help="how many such prefixes there are (default: 1)")  # fmt: skip
    group.add_argument("--priorities", type=_positive, default=1, metavar="N",
                       help="priorities 0 to N - 1 (default: 1)")  # fmt: skip
    group.add_argument("--seed", type=int, default=0, help="of all that is random (default: 0)")
    group.add_argument(
        "--arrivals", type=_checked(arrivals.parse_arrivals), metavar="RULE",
        default=arrivals.parse_arrivals("all"), help=f"{arrivals.NOTATION} (default: all)",
    )  # fmt: skip


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a whole number from 1 on is")
    return int(text)


def _checked(parse: Any) -> Any:
    """argparse shows the message of this error only."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed
