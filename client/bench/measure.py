"""From a plan to a result: a server, the workload, and all systems in turns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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

_SYNTHETIC_REQUESTS = 64
_WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Plan:
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
    is_warm: bool
    limits: Limits
    label: str


def measure(plan: Plan) -> Result:
    """Runs everything. Raises ChairliftError, LaunchError, BadWorkload or OSError."""
    return asyncio.run(_measure(plan))


async def _measure(plan: Plan) -> Result:
    if plan.workload is not None:
        read_workload(plan.workload)  # complains before a server has been started for it
    async with _server(plan) as chairlift:
        model = await chairlift.model_info()
        server = await chairlift.server_info()
        asks, words = _workload(plan, model.vocab_size)
        result = Result(
            workload=words,
            arrivals=str(plan.arrivals),
            seed=plan.seed,
            limits=plan.limits,
            machine=machine.describe_machine(),
            versions=machine.versions(),
            commit=machine.commit(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            server={**_facts(model), **_facts(server)},
            label=plan.label,
        )
        times = plan.arrivals.times(len(asks), plan.seed)
        num_tokens = sum(ask.max_new for ask in asks)
        await _warm_up(chairlift, asks[0])
        with _transformers(plan, model.model_path, asks) as transformers:
            for turn in range(plan.turns):
                if not plan.is_warm:
                    await chairlift.flush_cache()
                title = f"chairlift, turn {turn + 1} of {plan.turns}"
                with choose_progress(title, len(asks), num_tokens) as bar:
                    result.runs.append(await replay(chairlift, asks, times, bar.advance, turn))
                for system in plan.systems:
                    _say(f"{SYSTEMS[system]}, turn {turn + 1} of {plan.turns} …")
                    run = await asyncio.to_thread(transformers.run, system, turn)
                    result.runs.append(run)
    return result


@contextlib.asynccontextmanager
async def _server(plan: Plan) -> AsyncIterator[AsyncChairlift]:
    """A connection to the given server, or to one that lives as long as this."""
    if plan.address is not None:
        async with AsyncChairlift(plan.address, timeout=plan.timeout) as chairlift:
            yield chairlift
        return
    _say("starting a server")
    with _local_server(plan) as server:
        async with AsyncChairlift(server.address, timeout=plan.timeout) as chairlift:
            if not await server.is_ready(chairlift, lambda what: _say(f"waiting ({what})")):
                where = plan.server_log or "--server-log FILE keeps what it says"
                raise LaunchError(f"the server did not start: {where}")
            yield chairlift


@contextlib.contextmanager
def _local_server(plan: Plan) -> Iterator[LocalServer]:
    with open(plan.server_log or os.devnull, "wb") as log:
        server = LocalServer(plan.server_options, log)
        try:
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def _transformers(plan: Plan, model_path: str, asks: list[Ask]) -> Iterator[Transformers]:
    """Entered only where it is wanted: it loads the model once more."""
    transformers = Transformers(model_path, asks, plan.compare_threads)
    if not plan.systems:
        yield transformers
        return
    _say("loading transformers")
    with transformers:
        yield transformers


def _workload(plan: Plan, vocab_size: int) -> tuple[list[Ask], str]:
    """The requests, and how to call them."""
    if plan.workload is not None:
        asks = read_workload(plan.workload)[: plan.num_requests]
        return asks, f"{plan.workload.name}, {len(asks)} requests"
    recipe = Synthetic(
        num_requests=plan.num_requests or _SYNTHETIC_REQUESTS,
        prompt=plan.prompt,
        output=plan.output,
        vocab_size=vocab_size,
        seed=plan.seed,
        shared_prefix=plan.shared_prefix,
        num_prefixes=plan.num_prefixes,
        num_priorities=plan.num_priorities,
    )
    return make_up(recipe), recipe.describe()


async def _warm_up(chairlift: AsyncChairlift, ask: Ask) -> None:
    """The first request of a server pays for what is made once."""
    await chairlift.complete(
        ask.prompt, max_tokens=_WARM_UP_TOKENS, temperature=0.0, ignore_eos=True
    )


def _facts(message: Any) -> dict[str, Any]:
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _say(text: str) -> None:
    print(f"chairlift: {text}", file=sys.stderr, flush=True)
