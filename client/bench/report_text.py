"""Results for a terminal: a table with one column per system, or per file that is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from client.bench.figures import Figures, Limits, Spread
from client.bench.result import Result

UNKNOWN = "–"  # noqa: RUF001  # a dash stands for "nothing" in tables


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table."""

    title: str
    value: Callable[[Figures], str | None]  # None: not known of this run


def report(result: Result) -> str:
    """Everything about one result."""
    turns = max(len(runs) for runs in result.systems().values())
    lines = [
        f"workload  {result.workload}",
        f"arrivals  {result.arrivals}",
        f"server    {server_line(result)}",
        f"machine   {machine_line(result)}",
    ]
    if turns > 1:
        lines.append(f"turns     {turns}, medians below")
    lines += ["", table(result.figures(), result.limits)]
    ratios = result.ratios()
    lines += [""] if ratios else []
    for system, ratio in ratios.items():
        lines.append(f"chairlift gives {ratio:.2f} times the output tokens of {system}")
    notes = [f"{run.system}, turn {run.turn + 1}: {n}" for run in result.runs for n in run.notes]
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def comparison(results: Sequence[Result]) -> str:
    """Several results side by side; each is called by its label."""
    columns = {name: found.figures()[system] for name, (found, system) in labelled(results).items()}
    lines = [f"{result.label}: {result.workload}; {result.arrivals}" for result in results]
    return "\n".join([*lines, "", table(columns, results[0].limits)])


def labelled(results: Sequence[Result]) -> dict[str, tuple[Result, str]]:
    """Every system of every result, under a name that tells them apart; labels must differ."""
    return {
        (result.label if system == "chairlift" else f"{result.label}: {system}"): (result, system)
        for result in results
        for system in result.systems()
    }


def table(columns: dict[str, Figures], limits: Limits) -> str:
    """With a head line that names the columns."""
    rows = [["", *columns], *([title, *cells] for title, cells in table_rows(columns, limits))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    )


def table_rows(columns: Mapping[str, Figures], limits: Limits) -> list[tuple[str, list[str]]]:
    """(title, a cell per column); rows of which no column knows anything are left out."""
    rows = list(ROWS)
    if str(limits):
        rows.append(Row(f"goodput ({limits})", lambda f: f"{f.goodput:.3g}/s ({f.good_share:.0%})"))
    table = []
    for row in rows:
        values = [row.value(figures) for figures in columns.values()]
        if any(value is not None for value in values):
            table.append((row.title, [UNKNOWN if value is None else value for value in values]))
    return table


def server_line(result: Result) -> str:
    """What was served, and by which version."""
    server = result.server
    return (
        f"{server.get('model')} ({server.get('dtype')} on {server.get('device')}), "
        f"Chairlift {server.get('version')}"
    )


def machine_line(result: Result) -> str:
    """Where, and with what code."""
    machine = result.machine
    return (
        f"{machine.get('processor')}, {machine.get('cores')} cores, "
        f"{machine.get('memory_gib')} GiB; commit {result.commit or 'unknown'}"
    )


def seconds(value: float) -> str:
    """Three digits that count: 1.23 s, 45.6 ms."""
    if value >= 100:
        return f"{value:.0f} s"
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1000:.3g} ms"


def share(value: float | None) -> str | None:
    return None if value is None else f"{value:.0%}"


def spread_text(value: Spread | None) -> str | None:
    """The three percentiles."""
    if value is None:
        return None
    return " / ".join(seconds(part) for part in (value.p50, value.p90, value.p99))


def _row_steps(figures: Figures) -> str | None:
    if figures.row_steps is None or figures.row_steps_wasted is None:
        return None
    wasted = figures.row_steps_wasted
    note = f" ({wasted / figures.row_steps:.0%} wasted)" if wasted else ""
    return f"{figures.row_steps:,}{note}"


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


ROWS: tuple[Row, ...] = (
    Row("requests", lambda f: f"{f.num_requests}"),
    Row("failed", lambda f: f"{f.num_failed}" if f.num_failed else None),
    Row("seconds", lambda f: seconds(f.seconds)),
    Row("output tokens", lambda f: f"{f.output_tokens:,}"),
    Row("output tokens per second", lambda f: f"{f.output_tokens_per_second:.1f}"),
    Row("all tokens per second", lambda f: f"{f.total_tokens_per_second:.1f}"),
    Row("time to first token, p50 / p90 / p99", lambda f: spread_text(f.ttft)),
    Row("time per output token", lambda f: spread_text(f.tpot)),
    Row("gap between tokens", lambda f: spread_text(f.itl)),
    Row("end to end", lambda f: spread_text(f.e2e)),
    Row("most requests at once", lambda f: _count(f.most_at_once)),
    Row("KV pool held, mean", lambda f: share(f.pool_share)),
    Row("KV pool held, peak", lambda f: share(f.pool_share_peak)),
    Row("held pages that hold tokens", lambda f: share(f.utilisation)),
    Row("KV memory use, mean", lambda f: share(f.kv_use)),
    Row("KV memory use, peak", lambda f: share(f.kv_use_peak)),
    Row("prefix hit rate", lambda f: share(f.prefix_hit_rate)),
    Row("preemptions", lambda f: _count(f.preemptions) if f.num_steps else None),
    Row("steps", lambda f: _count(f.num_steps)),
    Row("rows computed", _row_steps),
    Row("tokens computed", lambda f: _count(f.tokens_computed)),
    Row("device busy", lambda f: share(f.device_share)),
)
