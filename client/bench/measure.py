"""A whole measurement: prepares server and workload, then runs all systems in turns."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from client.aio import AsyncChairlift
from client.bench import machine
from client.bench.arrivals import Arrivals
from client.bench.compare import SYSTEMS, Transformers
from client.bench.figures import Limits
from client.bench.progress import Progress
from client.bench.records import Run
from client.bench.replay import replay
from client.bench.result import Result
from client.bench.synthetic import Lengths, Recipe, make_requests
from client.bench.workload import WorkloadRequest, read_workload
from client.fields import as_dict
from client.processes.launch import LaunchError
from client.processes.local_server import LocalServer
from client.terminal.streams import print_error

SYNTHETIC_REQUESTS = 64  # by default
COMPARED = {  # what --compare may be → of SYSTEMS
    "transformers": ("static", "continuous"),
    "transformers-static": ("static",),
    "transformers-continuous": ("continuous",),
}
_WARM_UP_TOKENS = 4
_LOG_BYTES = 4000  # quoted of a server that did not start: about forty lines


class Settings(argparse.Namespace):
    """The options of `chairlift bench` that a measurement needs, as argparse sets them."""

    address: str
    serve: bool  # start a server instead, with the next two
    server_options: list[str]
    server_log: Path | None
    timeout: float | None
    workload: Path | None  # None: made from the options down to `seed`
    requests: int | None
    prompt: Lengths
    output: Lengths
    shared_prefix: int
    prefixes: int
    priorities: int
    seed: int
    arrivals: Arrivals
    turns: int
    compare: str | None  # of COMPARED
    compare_threads: int
    warm: bool  # keep the prefix cache
    gather: bool  # see replay
    speculate: int
    slo_ttft: float | None
    slo_tpot: float | None
    slo_e2e: float | None
    label: str


def measure(settings: Settings) -> Result:
    """Runs everything. Raises ChairliftError, LaunchError, BadWorkload or OSError."""
    return asyncio.run(_measure(settings))


async def _measure(settings: Settings) -> Result:
    path = settings.workload
    requests = read_workload(path)[: settings.requests] if path else []
    recipe = Recipe(
        num_requests=settings.requests or SYNTHETIC_REQUESTS,
        prompt=settings.prompt,
        output=settings.output,
        seed=settings.seed,
        shared_prefix=settings.shared_prefix,
        num_prefixes=settings.prefixes,
        num_priorities=settings.priorities,
    )
    systems = COMPARED[settings.compare] if settings.compare else ()
    async with contextlib.AsyncExitStack() as stack:
        chairlift = await stack.enter_async_context(_connection(settings))
        model = await chairlift.model_info()
        server = await chairlift.server_info()
        requests = requests or make_requests(recipe, model.vocab_size)
        result = Result(
            workload=(f"{path.name}, {len(requests)} requests" if path else str(recipe))
            + (f", speculate {settings.speculate}" if settings.speculate else ""),
            arrivals=str(settings.arrivals),
            seed=settings.seed,
            limits=Limits(settings.slo_ttft, settings.slo_tpot, settings.slo_e2e),
            machine=machine.describe_machine(),
            versions=machine.versions(),
            commit=machine.commit(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            server={**as_dict(model), **as_dict(server)},
            label=settings.label,
        )
        await chairlift.complete(  # one-time costs of the first request
            requests[0].prompt, max_tokens=_WARM_UP_TOKENS, temperature=0.0, ignore_eos=True
        )
        transformers = Transformers(model.model_path, requests, settings.compare_threads)
        if systems:
            print_error("loading transformers")
            stack.enter_context(transformers)
        for turn in range(settings.turns):
            title = f"turn {turn + 1} of {settings.turns}"
            result.runs.append(await _run(settings, chairlift, requests, turn, title))
            for system in systems:
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
    if not settings.warm:
        await chairlift.flush_cache()
    times = settings.arrivals.times(len(requests), settings.seed)
    num_tokens = sum(request.max_new for request in requests)
    with Progress(f"chairlift, {title}", len(requests), num_tokens, sys.stderr) as progress:
        return await replay(
            chairlift,
            requests,
            times,
            progress.advance,
            turn,
            gathers=settings.gather,
            speculate=settings.speculate,
        )


@contextlib.asynccontextmanager
async def _connection(settings: Settings) -> AsyncIterator[AsyncChairlift]:
    """A connection to the given server, or to one that is started and stopped here."""
    if not settings.serve:
        async with AsyncChairlift(
            settings.address, timeout=settings.timeout, retries=0
        ) as chairlift:
            yield chairlift
        return
    print_error("starting a server")
    path = settings.server_log
    with tempfile.TemporaryFile() if path is None else path.open("w+b") as log:
        server = LocalServer(settings.server_options, log)
        try:
            async with AsyncChairlift(
                server.address, timeout=settings.timeout, retries=0
            ) as chairlift:
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
