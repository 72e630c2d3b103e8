"""Watches the server's steps during a run, and converts their times to the client's clock."""

from __future__ import annotations

import asyncio
import time
from typing import Self

from client.aio import AsyncChairlift
from client.bench.records import StepRecord
from client.errors import ChairliftError
from protos import admin_pb2

_GRACE_SECONDS = 0.2  # for the summaries of the last steps to arrive


class StepWatch:
    """Collects step summaries from `async with` to its end; `notes` lists what is missing."""

    def __init__(self, chairlift: AsyncChairlift) -> None:
        self.notes: list[str] = []
        self._chairlift = chairlift
        self._summaries: list[admin_pb2.StepSummary] = []
        self._offset = float("inf")  # client's clock minus server's
        self._is_watching = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        await self._is_watching.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.wait([self._task], timeout=_GRACE_SECONDS)
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._summaries and self._summaries[-1].missed:
            self.notes.append(f"{self._summaries[-1].missed} steps were missed by the watcher")

    async def _watch(self) -> None:
        try:
            summaries = await self._chairlift.watch_steps()
            self._is_watching.set()
            async for summary in summaries:
                # A summary is sent when its step ends: the fastest one bounds the clocks'
                # difference best.
                sent = summary.start_seconds + summary.seconds
                self._offset = min(self._offset, time.monotonic() - sent)
                self._summaries.append(summary)
        except ChairliftError as error:
            self.notes.append(f"the server does not report its steps: {error}")
        finally:
            self._is_watching.set()

    def steps(self, start: float) -> list[StepRecord]:
        """The watched steps, in seconds since `start` (time.monotonic())."""
        return [
            StepRecord(
                start=round(summary.start_seconds + self._offset - start, 6),
                seconds=round(summary.seconds, 6),
                device_seconds=summary.device_seconds,
                num_tokens=summary.num_tokens,
                num_prefilling=summary.num_prefilling,
                num_decoding=summary.num_decoding,
                num_finished=summary.num_finished,
                num_running=summary.num_running,
                num_pending=summary.num_pending,
                chunks_used=summary.chunks_total - summary.chunks_free,
                chunks_total=summary.chunks_total,
                utilisation=round(summary.utilisation, 4),
            )
            for summary in self._summaries
        ]
