"""Replays a workload over gRPC and records when each answer arrived.

One task per request on one connection, like a gateway. A request that fails is part of the result;
an unreachable server is an error.
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
from client.bench.workload import WorkloadRequest
from client.errors import ChairliftError

_GATHER_SECONDS: Final = 0.2  # time for a whole burst to arrive

Advance = Callable[[int, bool], None]  # (tokens that have just arrived, whether a request ended)


async def replay(
    chairlift: AsyncChairlift,
    requests: Sequence[WorkloadRequest],
    times: Sequence[float],
    advance: Advance,
    turn: int = 0,
    *,
    gathers: bool = False,
    speculate: int = 0,
) -> Run:
    """One run over `requests`, sent at `times` (ascending seconds from now).

    With `gathers` a short unmeasured request keeps the server busy while the first requests
    arrive. Otherwise a policy that admits whatever it finds (static) would compute the first one of
    a burst alone. `speculate` is the most draft tokens per request and step.
    """
    before = await chairlift.get_cache()
    busy = _busy_server(chairlift, requests) if gathers else contextlib.nullcontext()
    async with StepWatch(chairlift) as watch, busy:
        start = time.monotonic()
        records = [
            RequestRecord(request.id, len(request.prompt), request.max_new, due, request.priority)
            for request, due in zip(requests, times, strict=True)
        ]
        async with asyncio.TaskGroup() as tasks:
            for request, record in zip(requests, records, strict=True):
                await asyncio.sleep(start + record.due - time.monotonic())
                tasks.create_task(_send(chairlift, request, record, start, advance, speculate))
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
async def _busy_server(
    chairlift: AsyncChairlift, requests: Sequence[WorkloadRequest]
) -> AsyncIterator[None]:
    """Runs a request for _GATHER_SECONDS; it is no longer than one of `requests`, so that it fits
    into the pool."""
    longest = max(request.max_new for request in requests)
    async with chairlift.generate(
        requests[0].prompt[:1], max_tokens=longest, temperature=0.0, ignore_eos=True
    ) as stream:
        await anext(stream)
        asyncio.get_running_loop().call_later(_GATHER_SECONDS, stream.cancel)
        yield


async def _send(
    chairlift: AsyncChairlift,
    request: WorkloadRequest,
    record: RequestRecord,
    start: float,
    advance: Advance,
    speculate: int,
) -> None:
    record.sent = _since(start)
    stream = chairlift.generate(
        request.prompt,
        priority=request.priority,
        max_tokens=request.max_new,
        temperature=0.0,
        ignore_eos=True,
        speculate=speculate or None,
    )
    try:
        async for delta in stream:
            if delta.token_ids:
                record.deliveries.append((_since(start), len(delta.token_ids)))
                advance(len(delta.token_ids), False)
    except ChairliftError as error:
        record.error = f"{error.status.name}: {error}"
    record.end = _since(start)
    if (completion := stream.completions.get(0)) is not None:
        record.cached_tokens = completion.usage.cached_tokens
        record.drafted_tokens = completion.usage.drafted_tokens
        record.accepted_tokens = completion.usage.accepted_tokens
        record.queued_seconds = completion.timing.queued_seconds
        record.prefill_seconds = completion.timing.prefill_seconds
        record.preemptions = completion.timing.preemptions
    advance(0, True)


def _since(start: float) -> float:
    """Seconds since `start`, to the microsecond: more digits only enlarge the files."""
    return round(time.monotonic() - start, 6)
