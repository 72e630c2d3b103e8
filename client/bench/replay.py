"""Sends a workload over gRPC when it is due, and writes down when each answer came.

One task per request on one connection, as a gateway would do it. A request that fails is part of
the result; a server that cannot be reached at all is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from client.aio import AsyncChairlift
from client.bench.records import RequestRecord, Run
from client.bench.step_watch import StepWatch
from client.bench.workload import Ask
from client.errors import ChairliftError

_GATHER_SECONDS: Final = 0.2  # all of a burst have arrived by then

Progress = Callable[[int, bool], None]  # (tokens that have just come, whether a request ended)


async def replay(
    chairlift: AsyncChairlift,
    asks: Sequence[Ask],
    times: Sequence[float],
    progress: Progress,
    turn: int = 0,
    *,
    gathers: bool = False,
) -> Run:
    """One run over `asks`, each sent at its moment of `times` (seconds from now, rising).

    With `gathers` a short request of its own, which is not measured, keeps the server busy while
    the first ones arrive: else a policy that admits whom it finds (static) would compute the first
    of a burst alone.
    """
    before = await chairlift.get_cache()
    async with StepWatch(chairlift) as watch, _plug(chairlift, asks, gathers):
        start = time.monotonic()
        records = [
            RequestRecord(ask.id, len(ask.prompt), ask.max_new, due, ask.priority)
            for ask, due in zip(asks, times, strict=True)
        ]
        async with asyncio.TaskGroup() as tasks:
            for ask, record in zip(asks, records, strict=True):
                await asyncio.sleep(start + record.due - time.monotonic())
                tasks.create_task(_ask(chairlift, ask, record, start, progress))
    after = await chairlift.get_cache()
    run = Run(
        "chairlift",
        turn,
        records,
        watch.steps(start),
        prefix_queries=after.prefix_queries - before.prefix_queries,
        prefix_hits=after.prefix_hits - before.prefix_hits,
        notes=watch.notes,
    )
    failed = [record for record in records if not record.is_complete]
    if failed:
        run.notes.append(
            f"{len(failed)} of {len(records)} requests failed, the first one with: "
            f"{failed[0].error or f'{failed[0].output_tokens} tokens of {failed[0].max_new}'}"
        )
    return run


@contextlib.asynccontextmanager
async def _plug(
    chairlift: AsyncChairlift, asks: Sequence[Ask], is_wanted: bool
) -> AsyncIterator[None]:
    """A request that is being computed from now on, for so many seconds; no longer than one of
    `asks`, so that it fits where they do."""
    if not is_wanted:
        yield
        return
    longest = max(ask.max_new for ask in asks)
    async with chairlift.generate(
        asks[0].prompt[:1], max_tokens=longest, temperature=0.0, ignore_eos=True
    ) as stream:
        await anext(stream)
        asyncio.get_running_loop().call_later(_GATHER_SECONDS, stream.cancel)
        yield


async def _ask(
    chairlift: AsyncChairlift, ask: Ask, record: RequestRecord, start: float, progress: Progress
) -> None:
    record.sent = _since(start)
    stream = chairlift.generate(
        ask.prompt,
        priority=ask.priority,
        max_tokens=ask.max_new,
        temperature=0.0,
        ignore_eos=True,
    )
    try:
        async for delta in stream:
            if delta.token_ids:
                record.deliveries.append((_since(start), len(delta.token_ids)))
                progress(len(delta.token_ids), False)
    except ChairliftError as error:
        record.error = f"{error.status.name}: {error}"
    record.end = _since(start)
    completion = stream.completions.get(0)
    if completion is not None:
        record.cached_tokens = completion.usage.cached_tokens
        record.queued_seconds = completion.timing.queued_seconds
        record.prefill_seconds = completion.timing.prefill_seconds
        record.preemptions = completion.timing.preemptions
    progress(0, True)


def _since(start: float) -> float:
    """To the microsecond: more digits only make files longer."""
    return round(time.monotonic() - start, 6)
