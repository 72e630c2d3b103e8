"""`chairlift status`: server, load and cache on one screen."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from client.blocking import Chairlift
from client.commands.options import add_server_options
from client.errors import ChairliftError, Unreachable
from client.fields import as_dict
from client.terminal.streams import printable
from protos import admin_pb2, inference_pb2

_MAX_REQUESTS = 20


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "status",
        help="show server, load and cache",
        description="Show the server, its load, its cache and the oldest live requests.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    add_server_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Exit code 0 if the server is ready, else 1."""
    timeout = options.timeout or 10.0
    with Chairlift(options.address, timeout=timeout) as chairlift:
        server = chairlift.server_info()
        # unknown until a worker has been ready
        model = _try(chairlift.model_info)
        cache = _try(chairlift.get_cache)
        live = _try(lambda: chairlift.list_requests(limit=_MAX_REQUESTS))
    if options.json:
        parts = {"server": server, "model": model, "cache": cache, "requests": live}
        known = {name: part and as_dict(part) for name, part in parts.items()}
        print(json.dumps(known, indent=2))
    else:
        text = report(options.address, server, model, cache, live)
        print(printable(text, sys.stdout))
    return 0 if server.is_ready else 1


def report(
    address: str,
    server: inference_pb2.GetServerInfoResponse,
    model: inference_pb2.GetModelInfoResponse | None,
    cache: admin_pb2.GetCacheResponse | None,
    live: admin_pb2.ListRequestsResponse | None,
) -> str:
    """The status as text."""
    state = "ready" if server.is_ready else "not ready"
    lines = [
        f"Chairlift {server.version} at {address}: {state}, up {duration(server.uptime_seconds)}",
        f"worker    {server.worker}"
        + (f" on {server.device}" if server.device else "")
        + (f" ({server.worker_busy})" if server.worker_busy else ""),
    ]
    if server.error:
        lines.append(f"error     {server.error}")
    if model is not None:
        lines.append(
            f"model     {model.model} ({model.architecture}, {model.dtype}), "
            f"up to {model.max_model_len} tokens per request"
        )
    lines.append(f"requests  {server.requests_running} running, {server.requests_waiting} waiting")
    if cache is not None and cache.chunks_total:
        lines += _cache_lines(cache)
    if live is not None and live.requests:
        lines += ["", *_request_lines(live.requests)]
        if live.total > len(live.requests):
            lines.append(f"… and {live.total - len(live.requests)} more")
    return "\n".join(lines)


def _cache_lines(cache: admin_pb2.GetCacheResponse) -> list[str]:
    size = cache.chunks_total * cache.chunk_bytes / 2**20
    line = f"cache     {_used(cache.chunks_total, cache.chunks_free)} of {size:.0f} MiB"
    if cache.tokens_stored:
        line += f", pages {cache.utilisation:.0%} full"
    lines = [f"{line}; page_size {cache.page_size}"]
    if cache.prefix_queries:
        hits = cache.prefix_hits / cache.prefix_queries
        cached = sum(group.blocks_cached for group in cache.groups)
        lines.append(
            f"prefixes  {hits:.0%} of {cache.prefix_queries} prompt tokens found; "
            f"{cached} free blocks still cached"
        )
    if cache.drafted_tokens:
        accepted = cache.accepted_tokens / cache.drafted_tokens
        lines.append(f"drafts    {accepted:.0%} of {cache.drafted_tokens} guessed tokens accepted")
    if cache.swap_chunks_total:
        lines.append(f"swap      {_used(cache.swap_chunks_total, cache.swap_chunks_free)}")
    preemptions = cache.offloads + cache.soft_resets
    if preemptions:
        lines.append(
            f"preempted {preemptions} times: {cache.offloads} offloads "
            f"({cache.restores} restored), {cache.soft_resets} soft resets"
        )
    return lines


def _used(total: int, free: int) -> str:
    return f"{total - free} of {total} chunks in use ({(total - free) / total:.0%})"


def _request_lines(requests: Sequence[admin_pb2.RequestSummary]) -> list[str]:
    rows = [("request", "state", "prompt", "output", "age")]
    rows += [
        (
            request.request_id + (f"[{request.index}]" if request.index else ""),
            request.state + (" (offloaded)" if request.offloaded else ""),
            str(request.prompt_tokens),
            f"{request.completion_tokens}/{request.max_tokens}",
            duration(request.age_seconds),
        )
        for request in requests
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def duration(seconds: float) -> str:
    """The two leading units: "1 h 2 min", "4 s"."""
    whole = int(seconds)
    units = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    parts: list[str] = []
    for name, size in units:
        count, whole = divmod(whole, size)
        if count or (name == "s" and not parts):
            parts.append(f"{count} {name}")
    return " ".join(parts[:2])


def _try(call: Callable[[], Any]) -> Any:
    """The call's result, or None if the server cannot answer it now."""
    try:
        return call()
    except Unreachable:
        raise
    except ChairliftError:
        return None
