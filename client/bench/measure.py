"""From settings to a result: a server, the workload, and all systems in turns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
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
from client.bench.lengths import Lengths
from client.bench.progress import choose_progress
from client.bench.replay import replay
from client.bench.result import Result
from client.bench.workload import Ask, Synthetic, make_up, read_workload
from client.launch import LaunchError
from client.local_server import LocalServer
from client.terminal import complain

_SYNTHETIC_REQUESTS = 64
_WARM_UP_TOKENS = 4
_LOG_BYTES = 4000  # of a server that did not start: about forty lines


@dataclass(frozen=True, slots=True)
class Settings:
    """What is to be measured; the options of the command."""

    address: str | None  # None: a server of its own
    server_options: tuple[str, ...]
    server_log: Path | None
    timeout: float | None
    workload: Path | None  # None: made up from the next seven
    num_requests: int | None
    prompt: Lengths
    output: Lengths
    shared_prefix: int
    num_prefixes: int
    num_priorities: int
    seed: int
    arrivals: Arrivals
    turns: int
    systems: tuple[str, ...]  # of transformers, beside Chairlift
    compare_threads: int
    is_warm: bool  # the prefix cache keeps what it has
    gathers: bool  # see replay
    limits: Limits
    label: str


def measure(settings: Settings) -> Result:
    """Runs everything. Raises ChairliftError, LaunchError, BadWorkload or OSError."""
    return asyncio.run(_measure(settings))


async def _measure(settings: Settings) -> Result:
    file = settings.workload
    given = None if file is None else read_workload(file)[: settings.num_requests]
    async with _server(settings) as chairlift:
        model = await chairlift.model_info()
        server = await chairlift.server_info()
        if file is None or given is None:
            recipe = _recipe(settings, model.vocab_size)
            asks, words = make_up(recipe), recipe.describe()
        else:
            asks, words = given, f"{file.name}, {len(given)} requests"
        result = Result(
            workload=words,
            arrivals=str(settings.arrivals),
            seed=settings.seed,
            limits=settings.limits,
            machine=machine.describe_machine(),
            versions=machine.versions(),
            commit=machine.commit(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            server={**_facts(model), **_facts(server)},
            label=settings.label,
        )
        times = settings.arrivals.times(len(asks), settings.seed)
        num_tokens = sum(ask.max_new for ask in asks)
        await _warm_up(chairlift, asks[0])
        with _transformers(settings, model.model_path, asks) as transformers:
            for turn in range(settings.turns):
                if not settings.is_warm:
                    await chairlift.flush_cache()
                title = f"chairlift, turn {turn + 1} of {settings.turns}"
                with choose_progress(title, len(asks), num_tokens) as bar:
                    run = await replay(
                        chairlift, asks, times, bar.advance, turn, gathers=settings.gathers
                    )
                result.runs.append(run)
                for system in settings.systems:
                    complain(f"{SYSTEMS[system]}, turn {turn + 1} of {settings.turns} …")
                    run = await asyncio.to_thread(transformers.run, system, turn)
                    result.runs.append(run)
    return result


@contextlib.asynccontextmanager
async def _server(settings: Settings) -> AsyncIterator[AsyncChairlift]:
    """A connection to the given server, or to one that lives as long as this."""
    if settings.address is not None:
        async with AsyncChairlift(settings.address, timeout=settings.timeout) as chairlift:
            yield chairlift
        return
    complain("starting a server")
    with _local_server(settings) as (server, log):
        async with AsyncChairlift(server.address, timeout=settings.timeout) as chairlift:
            if not await server.is_ready(chairlift, lambda what: complain(f"waiting ({what})")):
                raise LaunchError(f"the server did not start. It said:\n{_end_of(log)}")
            yield chairlift


@contextlib.contextmanager
def _local_server(settings: Settings) -> Iterator[tuple[LocalServer, IO[bytes]]]:
    """A server, and the file that it logs to."""
    given = settings.server_log
    with tempfile.TemporaryFile() if given is None else given.open("w+b") as log:
        server = LocalServer(settings.server_options, log)
        try:
            yield server, log
        finally:
            server.stop()


def _end_of(log: IO[bytes]) -> str:
    """What was written last. Read without moving the place where the server goes on writing."""
    size = os.fstat(log.fileno()).st_size
    end = os.pread(log.fileno(), _LOG_BYTES, max(0, size - _LOG_BYTES))
    return end.decode(errors="replace").rstrip()


@contextlib.contextmanager
def _transformers(settings: Settings, model_path: str, asks: list[Ask]) -> Iterator[Transformers]:
    """Entered only where it is wanted: it loads the model once more."""
    transformers = Transformers(model_path, asks, settings.compare_threads)
    if not settings.systems:
        yield transformers
        return
    complain("loading transformers")
    with transformers:
        yield transformers


def _recipe(settings: Settings, vocab_size: int) -> Synthetic:
    return Synthetic(
        num_requests=settings.num_requests or _SYNTHETIC_REQUESTS,
        prompt=settings.prompt,
        output=settings.output,
        vocab_size=vocab_size,
        seed=settings.seed,
        shared_prefix=settings.shared_prefix,
        num_prefixes=settings.num_prefixes,
        num_priorities=settings.num_priorities,
    )


async def _warm_up(chairlift: AsyncChairlift, ask: Ask) -> None:
    """The first request of a server pays for what is made once."""
    await chairlift.complete(
        ask.prompt, max_tokens=_WARM_UP_TOKENS, temperature=0.0, ignore_eos=True
    )


def _facts(message: Any) -> dict[str, Any]:
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
