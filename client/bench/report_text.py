"""Results as text: a table with one column per system, or per compared file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from client.bench.figures import Figures, Limits, Spread
from client.bench.records import Run
from client.bench.result import Result

UNKNOWN = "–"  # noqa: RUF001  # the usual mark for "no value" in tables


def report(results: Sequence[Result]) -> str:
    """The report on one result, or a comparison of several under their labels."""
    if len(results) == 1:
        turns = max(len(runs) for runs in results[0].systems().values())
        facts = {"workload": results[0].workload, **facts_of(results[0])}
        facts |= {"turns": f"{turns}, medians below"} if turns > 1 else {}
        lines = [f"{name:8}  {value}" for name, value in facts.items()]
        ratios = results[0].ratios()
    else:
        lines = [f"{result.label}: {result.workload}; {result.arrivals}" for result in results]
        ratios = {}
    figures = {name: figures for name, (figures, _) in columns(results).items()}
    lines += ["", table(figures, results[0].limits), *([""] if ratios else [])]
    for system, ratio in ratios.items():
        lines.append(f"chairlift: {ratio:.2f} times the output tokens per second of {system}")
    return "\n".join([*lines, *(f"note: {note}" for note in notes(results))])


def columns(results: Sequence[Result]) -> dict[str, tuple[Figures, Run]]:
    """The figures and the first run of each system, by the name of its column: the system of a
    single result, the label of several, which must differ."""
    found = {}
    for result in results:
        for system, figures in result.figures().items():
            name = system
            if len(results) > 1:
                name = result.label if system == "chairlift" else f"{result.label}: {system}"
            found[name] = (figures, result.systems()[system][0])
    return found


def notes(results: Sequence[Result]) -> list[str]:
    """The notes of all runs, each with its result (of several), system and turn."""
    return [
        (f"{result.label}: " if len(results) > 1 else "")
        + f"{run.system}, turn {run.turn + 1}: {note}"
        for result in results
        for run in result.runs
        for note in run.notes
    ]


def table(columns: Mapping[str, Figures], limits: Limits) -> str:
    """The table with a head line."""
    rows = [["", *columns], *([title, *cells] for title, cells in table_rows(columns, limits))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    )


def table_rows(columns: Mapping[str, Figures], limits: Limits) -> list[tuple[str, list[str]]]:
    """(title, a cell per column); rows that are unknown in every column are omitted."""
    rows = dict(_ROWS)
    if str(limits):
        rows[f"goodput ({limits})"] = lambda f: f"{f.goodput:.3g}/s ({f.good_share:.0%})"
    cells = {title: [cell(f) for f in columns.values()] for title, cell in rows.items()}
    return [(title, [cell or UNKNOWN for cell in row]) for title, row in cells.items() if any(row)]


def facts_of(result: Result) -> dict[str, str]:
    """What was measured, where, and with which code."""
    server = result.server
    return {
        "arrivals": result.arrivals,
        "server": f"{server.get('model')} ({server.get('dtype')} on {server.get('device')}), "
        f"Chairlift {server.get('version')}",
        "machine": machine_line(result),
        "measured": f"{result.started}, seed {result.seed}",
        "versions": ", ".join(f"{name} {version}" for name, version in result.versions.items()),
    }


def machine_line(result: Result) -> str:
    """Machine and commit on one line."""
    machine = result.machine
    return (
        f"{machine.get('processor')}, {machine.get('cores')} cores, "
        f"{machine.get('memory_gib')} GiB; commit {result.commit or 'unknown'}"
    )


def seconds(value: float) -> str:
    """Three significant digits: 1.23 s, 45.6 ms."""
    if value >= 100:
        return f"{value:.0f} s"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"


def share(value: float | None) -> str | None:
    return None if value is None else f"{value:.0%}"


def _percentiles(value: Spread | None) -> str | None:
    return " / ".join(map(seconds, (value.p50, value.p90, value.p99))) if value else None


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _drafts(figures: Figures) -> str | None:
    if not figures.drafted:
        return None
    return f"{figures.drafted:,} ({figures.accepted / figures.drafted:.0%})"


def _row_steps(figures: Figures) -> str | None:
    if not (wasted := figures.row_steps_wasted) or not figures.row_steps:
        return _count(figures.row_steps)
    return f"{figures.row_steps:,} ({wasted / figures.row_steps:.0%} wasted)"


_ROWS: dict[str, Callable[[Figures], str | None]] = {  # None: unknown
    "requests": lambda f: f"{f.num_requests}",
    "failed": lambda f: f"{f.num_failed}" if f.num_failed else None,
    "seconds": lambda f: seconds(f.seconds),
    "output tokens": lambda f: _count(f.output_tokens),
    "output tokens per second": lambda f: f"{f.output_tokens_per_second:.1f}",
    "all tokens per second": lambda f: f"{f.total_tokens_per_second:.1f}",
    "time to first token, p50 / p90 / p99": lambda f: _percentiles(f.ttft),
    "time per output token": lambda f: _percentiles(f.tpot),
    "gap between tokens": lambda f: _percentiles(f.itl),
    "end to end": lambda f: _percentiles(f.e2e),
    "most requests at once": lambda f: _count(f.most_at_once),
    "KV pool held, mean": lambda f: share(f.pool_share),
    "KV pool held, peak": lambda f: share(f.pool_share_peak),
    "held pages that hold tokens": lambda f: share(f.utilisation),
    "KV memory use, mean": lambda f: share(f.kv_use),
    "KV memory use, peak": lambda f: share(f.kv_use_peak),
    "prefix hit rate": lambda f: share(f.prefix_hit_rate),
    "draft tokens (accepted)": _drafts,
    "preemptions": lambda f: _count(f.preemptions) if f.num_steps else None,
    "steps": lambda f: _count(f.num_steps),
    "rows computed": _row_steps,
    "tokens computed": lambda f: _count(f.tokens_computed),
    "device busy": lambda f: share(f.device_share),
}
