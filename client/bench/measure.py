"""A whole measurement: prepares server and workload, then runs all systems in turns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from google.protobuf.json_format import MessageToDict

from client.aio import AsyncChairlift
from client.bench import machine
from client.bench.arrivals import Arrivals
from client.bench.compare import SYSTEMS, Transformers
from client.bench.figures import Limits
from client.bench.progress import Progress
from client.bench.records import Run
from client.bench.replay import replay
from client.bench.result import Result
from client.bench.synthetic import Recipe, make_requests
from client.bench.workload import WorkloadRequest, read_workload
from client.processes.launch import LaunchError
from client.processes.local_server import LocalServer
from client.terminal.streams import print_error

_WARM_UP_TOKENS = 4
_LOG_BYTES = 4000  # quoted of a server that did not start: about forty lines


@dataclass(frozen=True, slots=True)
class Settings:
    address: str | None  # None: start a server
    server_options: list[str]
    server_log: Path | None
    timeout: float | None
    workload: Path | None  # None: made by `recipe`
    num_requests: int | None  # of the workload file; None: all
    recipe: Recipe
    arrivals: Arrivals
    turns: int
    systems: tuple[str, ...]  # of SYSTEMS, measured beside Chairlift
    compare_threads: int
    is_warm: bool  # keep the prefix cache
    gathers: bool  # see replay
    limits: Limits
    label: str


def measure(settings: Settings) -> Result:
    """Runs everything. Raises ChairliftError, LaunchError, BadWorkload or OSError."""
    return asyncio.run(_measure(settings))


async def _measure(settings: Settings) -> Result:
    path = settings.workload
    requests = read_workload(path)[: settings.num_requests] if path else []
    async with contextlib.AsyncExitStack() as stack:
        chairlift = await stack.enter_async_context(_connection(settings))
        model = await chairlift.model_info()
        server = await chairlift.server_info()
        requests = requests or make_requests(settings.recipe, model.vocab_size)
        result = Result(
            workload=f"{path.name}, {len(requests)} requests" if path else str(settings.recipe),
            arrivals=str(settings.arrivals),
            seed=settings.recipe.seed,
            limits=settings.limits,
            machine=machine.describe_machine(),
            versions=machine.versions(),
            commit=machine.commit(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            server={**_as_dict(model), **_as_dict(server)},
            label=settings.label,
        )
        await chairlift.complete(  # one-time costs of the first request
            requests[0].prompt, max_tokens=_WARM_UP_TOKENS, temperature=0.0, ignore_eos=True
        )
        transformers = Transformers(model.model_path, requests, settings.compare_threads)
        if settings.systems:
            print_error("loading transformers")
            stack.enter_context(transformers)
        for turn in range(settings.turns):
            title = f"turn {turn + 1} of {settings.turns}"
            result.runs.append(await _run(settings, chairlift, requests, turn, title))
            for system in settings.systems:
                print_error(f"{SYSTEMS[system]}, {title} …")
                result.runs.append(await asyncio.to_thread(transformers.run, system, turn))
    return result


async def _run(
    settings: Settings,
    chairlift: AsyncChairlift,
    requests: list[WorkloadRequest],
    turn: int,
    title: str,
) -> Run:
    """One turn of Chairlift."""
    if not settings.is_warm:
        await chairlift.flush_cache()
    times = settings.arrivals.times(len(requests), settings.recipe.seed)
    num_tokens = sum(request.max_new for request in requests)
    with Progress(f"chairlift, {title}", len(requests), num_tokens, sys.stderr) as progress:
        return await replay(
            chairlift, requests, times, progress.advance, turn, gathers=settings.gathers
        )


@contextlib.asynccontextmanager
async def _connection(settings: Settings) -> AsyncIterator[AsyncChairlift]:
    """A connection to the given server, or to one that is started and stopped here."""
    if settings.address is not None:
        async with AsyncChairlift(settings.address, timeout=settings.timeout) as chairlift:
            yield chairlift
        return
    print_error("starting a server")
    path = settings.server_log
    with tempfile.TemporaryFile() if path is None else path.open("w+b") as log:
        server = LocalServer(settings.server_options, log)
        try:
            async with AsyncChairlift(server.address, timeout=settings.timeout) as chairlift:
                if not await server.is_ready(
                    chairlift, lambda why: print_error(f"waiting ({why})")
                ):
                    raise LaunchError(f"the server did not start. Its last output:\n{_tail(log)}")
                yield chairlift
        finally:
            server.stop()


def _tail(log: IO[bytes]) -> str:
    """The end of the log, read without moving the position at which the server writes."""
    size = os.fstat(log.fileno()).st_size
    end = os.pread(log.fileno(), _LOG_BYTES, max(0, size - _LOG_BYTES))
    return end.decode(errors="replace").rstrip()


def _as_dict(message: Any) -> dict[str, Any]:
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
