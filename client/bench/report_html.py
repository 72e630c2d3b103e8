"""A result as one HTML page with its pictures inside: no script, no network, light and dark."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from client.bench import charts
from client.bench.charts import Layer, StepChart
from client.bench.figures import Figures, Limits, e2e, tpot, ttft
from client.bench.records import RequestRecord, Run
from client.bench.report_text import columns, facts_of, notes, seconds, share, table_rows
from client.bench.result import Result

STYLE = Path(__file__).with_name("report.css").read_text(encoding="utf-8")

_Requests = Mapping[str, Sequence[RequestRecord]]  # by system


ROWS = StepChart(
    "Rows of each step",
    "requests computed together, and those that wait",
    (
        Layer("decoding", "decoding", lambda step: step.num_decoding),
        Layer("prefilling", "prefilling", lambda step: step.num_prefilling),
        Layer("failed", "finished, computed anyway", lambda step: step.num_finished),
    ),
    line=Layer("waiting", "waiting", lambda step: step.num_pending),
)
_STEP_CHARTS = (
    ROWS,
    StepChart(
        "Tokens of each step",
        "a decoding row adds one, prompts are computed in chunks",
        (
            Layer("decoding", "decoding", lambda step: step.num_decoding + step.num_finished),
            Layer(
                "prefilling",
                "prefilling",
                lambda step: step.num_tokens - step.num_decoding - step.num_finished,
            ),
        ),
    ),
    StepChart(
        "KV pool",
        "share of its {chunks:,} chunks",
        (
            Layer("stored", "holds tokens", lambda s: 100 * s.pool_share * s.utilisation),
            Layer("empty", "held, but empty", lambda s: 100 * s.pool_share * (1 - s.utilisation)),
        ),
        unit=" %",
    ),
)
_LATENCIES: dict[str, Callable[[RequestRecord], float | None]] = {
    "Time to first token": ttft,
    "Time per output token": tpot,
    "End to end": e2e,
}
_COMPARED: dict[str, tuple[Callable[[Figures], float | None], Callable[[float], str]]] = {
    "Output tokens per second": (lambda f: f.output_tokens_per_second, "{:.1f}".format),
    "End to end, p50": (lambda f: f.e2e.p50 if f.e2e else None, seconds),
    "End to end, p99": (lambda f: f.e2e.p99 if f.e2e else None, seconds),
    "Time to first token, p50": (lambda f: f.ttft.p50 if f.ttft else None, seconds),
    "Most requests at once": (lambda f: f.most_at_once, "{:.0f}".format),
    "KV memory use, mean": (lambda f: f.kv_use, "{:.0%}".format),
    "Rows computed": (lambda f: f.row_steps, "{:,.0f}".format),
}


def page(results: Sequence[Result]) -> str:
    """One result: figures, what happened when, and latencies. Or several side by side."""
    found = columns(results)
    figures = {name: each for name, (each, _) in found.items()}
    firsts = {name: run for name, (_, run) in found.items()}
    if len(results) == 1:
        subtitle = results[0].workload
        watched = [run for run in firsts.values() if run.steps] or list(firsts.values())[:1]
        parts = [_facts(results[0]), _tiles(next(iter(figures.values()))), *map(_run, watched)]
    else:
        subtitle = " · ".join(result.label for result in results)
        heads = [f"<h2>{_text(r.label)}: {_text(r.workload)}</h2>{_facts(r)}" for r in results]
        parts = ["<div class='beside wider'><div>", "</div><div>".join(heads), "</div></div>"]
    noted = "".join(f"<li>{_text(note)}" for note in notes(results))
    parts += [
        _bars(figures) if len(figures) > 1 else "",
        _latencies({name: run.requests for name, run in firsts.items()}),
        _table(figures, results[0].limits),
        f"<h2>Notes</h2><ul>{noted}</ul>" if noted else "",
    ]
    return _frame(subtitle, parts)


def _frame(subtitle: str, parts: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Chairlift bench: {_text(subtitle)}</title><style>\n{STYLE}</style></head><body>"
        f"<h1>Chairlift bench</h1><p class=subtitle>{_text(subtitle)}</p>"
        + "\n".join(part for part in parts if part)
        + "</body></html>\n"
    )


def _facts(result: Result) -> str:
    settings = result.server.get("config") or {}
    details = f"<details><summary>all settings</summary>{_list(settings)}</details>"
    return _list(facts_of(result)) + (details if settings else "")


def _list(entries: Mapping[str, object]) -> str:
    rows = (f"<dt>{_text(name)}<dd>{_text(value)}" for name, value in entries.items())
    return f"<dl>{''.join(rows)}</dl>"


def _tiles(figures: Figures) -> str:
    tiles = {
        "output tokens per second": f"{figures.output_tokens_per_second:.1f}",
        "to the first token, p50": figures.ttft and seconds(figures.ttft.p50),
        "per output token, p50": figures.tpot and seconds(figures.tpot.p50),
        "end to end, p99": figures.e2e and seconds(figures.e2e.p99),
        "KV memory use, mean": share(figures.kv_use),
        "most at once": figures.most_at_once,
    }
    shown = (f"<div><b>{value}</b>{what}</div>" for what, value in tiles.items() if value)
    return f"<div class=tiles>{''.join(shown)}</div>"


def _run(run: Run) -> str:
    """What happened when: all pictures have the same time axis."""
    length = max([record.end for record in run.requests] + [step.end for step in run.steps])
    states = [(state, state.upper()) for state in ("pending", "prefilling", "decoding")]
    note = "one line each, in the order in which they were sent"
    pictures = [_figure("Requests", note, charts.timeline(run.requests, length), states)]
    for chart in _STEP_CHARTS if run.steps else ():
        chunks = run.steps[0].chunks_total
        drawn = [layer for layer in chart.layers if any(map(layer.value, run.steps))]
        keys = [(layer.class_, layer.name) for layer in (*drawn, *filter(None, [chart.line]))]
        svg = charts.over_time(run.steps, length, chart)
        pictures.append(_figure(chart.title, chart.note.format(chunks=chunks), svg, keys))
    return f"<h2>{_text(run.system)}, turn {run.turn + 1}</h2>{''.join(pictures)}"


def _latencies(requests: _Requests) -> str:
    pictures = []
    for title, latency in _LATENCIES.items():
        values = {
            system: [v for r in records if r.is_complete and (v := latency(r)) is not None]
            for system, records in requests.items()
        }
        if any(values.values()):
            svg = charts.distribution(values, f"{title}: share of requests by seconds")
            pictures.append(_figure(title, "", svg))
    keys = [(f"c{number}", system) for number, system in enumerate(requests)]
    return (
        "<h2>Latencies <small>cumulative share of requests by seconds</small>"
        f"{_legend(keys) if len(keys) > 1 else ''}</h2><div class=beside>{''.join(pictures)}</div>"
    )


def _bars(columns: Mapping[str, Figures]) -> str:
    pictures = []
    for title, (value, shown) in _COMPARED.items():
        found = {name: value(figures) for name, figures in columns.items()}
        known = {name: float(number) for name, number in found.items() if number is not None}
        if len(known) > 1:
            pictures.append(_figure(title, "", charts.bars(known, shown, title)))
    return f"<h2>Side by side</h2><div class='beside wider'>{''.join(pictures)}</div>"


def _figure(title: str, note: str, svg: str, keys: Iterable[tuple[str, str]] = ()) -> str:
    caption = f"<b>{_text(title)}</b> <small>{_text(note)}</small>{_legend(keys)}"
    return f"<figure><figcaption>{caption}</figcaption>{svg}</figure>"


def _legend(keys: Iterable[tuple[str, str]]) -> str:
    """`keys` are (class, name) of each colour."""
    entries = (f"<span><i class={class_}></i>{_text(name)}</span>" for class_, name in keys)
    return f"<span class=legend>{''.join(entries)}</span>"


def _table(columns: Mapping[str, Figures], limits: Limits) -> str:
    head = "".join(f"<th>{_text(name)}" for name in columns)
    body = "".join(
        f"<tr><th>{_text(title)}" + "".join(f"<td>{_text(cell)}" for cell in cells)
        for title, cells in table_rows(columns, limits)
    )
    return f"<h2>All figures</h2><div class=wide><table><tr><td>{head}{body}</table></div>"


def _text(value: object) -> str:
    return html.escape(str(value))
