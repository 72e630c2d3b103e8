"""A result as one HTML page with its pictures inside: no script, no network, light and dark."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence

from client.bench import charts
from client.bench.charts import Layer
from client.bench.figures import Figures, Limits, e2e, tpot, ttft
from client.bench.records import RequestRecord, Run, StepRecord
from client.bench.report_text import (
    labelled,
    machine_line,
    seconds,
    server_line,
    share,
    table_rows,
)
from client.bench.result import Result
from client.bench.style import STYLE

_LATENCIES: tuple[tuple[str, Callable[[RequestRecord], float | None]], ...] = (
    ("Time to first token", ttft),
    ("Time per output token", tpot),
    ("End to end", e2e),
)
_Compared = tuple[str, Callable[[Figures], float | None], Callable[[float], str]]
_COMPARED: tuple[_Compared, ...] = (
    ("Output tokens per second", lambda f: f.output_tokens_per_second, lambda v: f"{v:.1f}"),
    ("End to end, p50", lambda f: f.e2e.p50 if f.e2e else None, seconds),
    ("End to end, p99", lambda f: f.e2e.p99 if f.e2e else None, seconds),
    ("Time to first token, p50", lambda f: f.ttft.p50 if f.ttft else None, seconds),
    ("Most requests at once", lambda f: f.most_at_once, lambda v: f"{v:.0f}"),
    ("KV memory use, mean", lambda f: f.kv_use, lambda v: f"{v:.0%}"),
    ("Rows computed", lambda f: f.row_steps, lambda v: f"{v:,.0f}"),
)


def result_page(result: Result) -> str:
    """One result: its figures, what happened when, and how latencies spread."""
    columns = result.figures()
    parts = [
        _facts(result),
        _tiles(columns),
        *[_run(run, len(result.systems()[run.system])) for run in _shown_runs(result)],
        _latencies({system: runs[0].requests for system, runs in result.systems().items()}),
        _bars(columns) if len(columns) > 1 else "",
        _table(columns, result.limits),
        _notes(result),
    ]
    return _page("Chairlift bench", result.workload, parts)


def comparison_page(results: Sequence[Result]) -> str:
    """Several results side by side."""
    named = labelled(results)
    columns = {name: result.figures()[system] for name, (result, system) in named.items()}
    requests = {
        name: result.systems()[system][0].requests for name, (result, system) in named.items()
    }
    parts = [
        "<div class='beside wider'>"
        + "".join(
            f"<div><h2>{_text(r.label)}: {_text(r.workload)}</h2>{_facts(r)}</div>" for r in results
        )
        + "</div>",
        _bars(columns),
        _latencies(requests),
        _table(columns, results[0].limits),
    ]
    return _page("Chairlift bench", " · ".join(r.label for r in results), parts)


def _page(title: str, subtitle: str, parts: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}: {_text(subtitle)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{_text(title)}</h1><p class=subtitle>{_text(subtitle)}</p>"
        + "\n".join(part for part in parts if part)
        + "</body></html>\n"
    )


def _facts(result: Result) -> str:
    settings = result.server.get("config") or {}
    lines = [
        ("arrivals", result.arrivals),
        ("server", server_line(result)),
        ("machine", machine_line(result)),
        ("measured", f"{result.started}, seed {result.seed}"),
        ("versions", ", ".join(f"{name} {v}" for name, v in result.versions.items())),
    ]
    rows = "".join(f"<dt>{_text(name)}<dd>{_text(value)}" for name, value in lines)
    shown = "".join(f"<dt>{_text(name)}<dd>{_text(value)}" for name, value in settings.items())
    details = f"<details><summary>all settings</summary><dl>{shown}</dl></details>" if shown else ""
    return f"<dl class=facts>{rows}</dl>{details}"


def _tiles(columns: Mapping[str, Figures]) -> str:
    figures = next(iter(columns.values()))
    tiles = [
        (f"{figures.output_tokens_per_second:.1f}", "output tokens per second"),
        (seconds(figures.ttft.p50) if figures.ttft else None, "to the first token, p50"),
        (seconds(figures.tpot.p50) if figures.tpot else None, "per output token, p50"),
        (seconds(figures.e2e.p99) if figures.e2e else None, "end to end, p99"),
        (share(figures.kv_use), "KV memory use, mean"),
        (None if figures.most_at_once is None else f"{figures.most_at_once}", "most at once"),
    ]
    return (
        "<div class=tiles>"
        + "".join(
            f"<div><b>{_text(value)}</b>{_text(what)}</div>" for value, what in tiles if value
        )
        + "</div>"
    )


def _shown_runs(result: Result) -> list[Run]:
    """The first turn of every system that told of its steps; else of the first one."""
    firsts = [runs[0] for runs in result.systems().values()]
    return [run for run in firsts if run.steps] or firsts[:1]


def _run(run: Run, turns: int) -> str:
    """What happened when: all pictures share their time axis."""
    length = max([record.end for record in run.requests] + [step.end for step in run.steps])
    which = f"{run.system}, first of {turns} turns" if turns > 1 else run.system
    pictures = [
        _figure(
            "Requests",
            "one line each, in the order in which they were sent",
            charts.timeline(run.requests, length),
            ("pending", "PENDING"), ("prefilling", "PREFILLING"), ("decoding", "DECODING"),
        )
    ]  # fmt: skip
    if run.steps:
        has_wasted = any(step.num_finished for step in run.steps)
        pictures += [
            _figure(
                "Rows of each step",
                "requests computed together, and those that wait",
                charts.over_time(
                    run.steps,
                    length,
                    [
                        Layer("decoding", lambda step: step.num_decoding),
                        Layer("prefilling", lambda step: step.num_prefilling),
                        Layer("failed", lambda step: step.num_finished),
                    ],
                    "Rows of each step by what they compute, and requests that wait",
                    line=Layer("waiting", lambda step: step.num_pending),
                ),
                ("decoding", "decoding"), ("prefilling", "prefilling"),
                *([("failed", "ended, computed all the same")] if has_wasted else []),
                ("waiting", "waiting"),
            ),
            _figure(
                "Tokens of each step",
                "prompt tokens come in chunks, a decoding row adds one",
                charts.over_time(
                    run.steps,
                    length,
                    [
                        Layer("decoding", lambda step: step.num_decoding + step.num_finished),
                        Layer(
                            "prefilling",
                            lambda s: s.num_tokens - s.num_decoding - s.num_finished,
                        ),
                    ],
                    "Tokens of each step",
                ),
                ("decoding", "decoding"), ("prefilling", "prefilling"),
            ),
            _figure(
                "KV pool",
                f"share of its {run.steps[0].chunks_total:,} chunks",
                charts.over_time(
                    run.steps,
                    length,
                    [
                        Layer("stored", lambda s: 100 * _held(s) * s.utilisation),
                        Layer("empty", lambda s: 100 * _held(s) * (1 - s.utilisation)),
                    ],
                    "Share of the KV pool that is held",
                    unit=" %",
                ),
                ("stored", "holds tokens"), ("empty", "held, but empty"),
            ),
        ]  # fmt: skip
    return f"<h2>{_text(which)}</h2>" + "".join(pictures)


def _held(step: StepRecord) -> float:
    return step.chunks_used / step.chunks_total if step.chunks_total else 0.0


def _latencies(requests: Mapping[str, Sequence[RequestRecord]]) -> str:
    pictures = []
    for title, measure in _LATENCIES:
        values = {
            system: [
                value
                for record in records
                if record.is_complete and (value := measure(record)) is not None
            ]
            for system, records in requests.items()
        }
        if any(values.values()):
            drawn = charts.distribution(values, f"{title}: share of requests by seconds")
            pictures.append(_figure(title, "", drawn))
    keys = [(f"c{number}", system) for number, system in enumerate(requests)]
    note = "the share of requests that took at most so long"
    return (
        f"<h2>Latencies <small>{note}</small>{_legend(keys if len(keys) > 1 else [])}</h2>"
        f"<div class=beside>{''.join(pictures)}</div>"
    )


def _bars(columns: Mapping[str, Figures]) -> str:
    pictures = []
    for title, value, shown in _COMPARED:
        known = {
            name: float(found)
            for name, figures in columns.items()
            if (found := value(figures)) is not None
        }
        if len(known) > 1:
            pictures.append(_figure(title, "", charts.bars(known, shown, title)))
    return f"<h2>Side by side</h2><div class='beside wider'>{''.join(pictures)}</div>"


def _figure(title: str, note: str, picture: str, *keys: tuple[str, str]) -> str:
    return (
        f"<figure><figcaption><b>{_text(title)}</b> <small>{_text(note)}</small>"
        f"{_legend(keys)}</figcaption>{picture}</figure>"
    )


def _legend(keys: Sequence[tuple[str, str]]) -> str:
    """(class, name) of each colour."""
    entries = "".join(f"<span><i class={class_}></i>{_text(name)}</span>" for class_, name in keys)
    return f"<span class=legend>{entries}</span>"


def _table(columns: Mapping[str, Figures], limits: Limits) -> str:
    head = "".join(f"<th>{_text(name)}" for name in columns)
    body = ""
    for title, cells in table_rows(columns, limits):
        body += f"<tr><th>{_text(title)}" + "".join(f"<td>{_text(cell)}" for cell in cells)
    return f"<h2>All figures</h2><div class=wide><table><tr><td>{head}{body}</table></div>"


def _notes(result: Result) -> str:
    notes = [f"{run.system}, turn {run.turn + 1}: {n}" for run in result.runs for n in run.notes]
    return (
        "<h2>Notes</h2><ul>" + "".join(f"<li>{_text(note)}" for note in notes) + "</ul>"
        if (notes)
        else ""
    )


def _text(value: object) -> str:
    return html.escape(str(value))
