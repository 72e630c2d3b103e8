"""Sends a workload over gRPC when it is due, and writes down when each answer came.

One task per request on one connection, as a gateway would do it. A request that fails is part of
the result; a server that cannot be reached at all is an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from client.aio import AsyncChairlift
from client.bench.records import RequestRecord, Run
from client.bench.step_watch import StepWatch
from client.bench.workload import Ask
from client.errors import ChairliftError

Progress = Callable[[int, bool], None]  # (tokens that have just come, whether a request ended)


async def replay(
    chairlift: AsyncChairlift,
    asks: Sequence[Ask],
    times: Sequence[float],
    progress: Progress,
    turn: int = 0,
) -> Run:
    """One run over `asks`, each sent at its moment of `times` (seconds from now, rising)."""
    before = await chairlift.get_cache()
    async with StepWatch(chairlift) as watch:
        start = time.monotonic()
        records = [
            RequestRecord(ask.id, len(ask.prompt), ask.max_new, due, ask.priority)
            for ask, due in zip(asks, times, strict=True)
        ]
        async with asyncio.TaskGroup() as tasks:
            for ask, record in zip(asks, records, strict=True):
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


async def _ask(
    chairlift: AsyncChairlift, ask: Ask, record: RequestRecord, start: float, progress: Progress
) -> None:
    delay = start + record.due - time.monotonic()
    if delay > 0:
        await asyncio.sleep(delay)
    record.sent = time.monotonic() - start
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
                record.deliveries.append((time.monotonic() - start, len(delta.token_ids)))
                progress(len(delta.token_ids), False)
    except ChairliftError as error:
        record.error = f"{error.status.name}: {error}"
    record.end = time.monotonic() - start
    completion = stream.completions.get(0)
    if completion is not None:
        record.cached_tokens = completion.usage.cached_tokens
        record.queued_seconds = completion.timing.queued_seconds
        record.prefill_seconds = completion.timing.prefill_seconds
        record.preemptions = completion.timing.preemptions
    progress(0, True)
