"""chairlift.v1.Admin: what an operator asks at 3 a.m.

Reads, and the flush of the prefix cache, are questions to the engine's thread, which alone sees the
state; the answers are plain values. What comes in a later version answers UNIMPLEMENTED with a
sentence.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import grpc

from protos import admin_pb2 as pb
from protos import admin_pb2_grpc
from scheduler_svc.core.request import RequestState
from scheduler_svc.errors import NotImplementedYet, RequestRejected, UnknownRequest
from scheduler_svc.front.streams import LiveStream, LiveStreams

if TYPE_CHECKING:
    from scheduler_svc.core.state import State
    from scheduler_svc.engine.engine import Engine
    from scheduler_svc.engine.views import CacheView, RequestDetail, RequestView

Context = grpc.aio.ServicerContext[Any, Any]

DEFAULT_LIMIT = 1000


class Views(Protocol):
    """scheduler_svc/core/views.py, or what a test puts in its place."""

    def list_requests(self, state: State, wanted: str, limit: int) -> list[RequestView]: ...
    def count_requests(self, state: State, wanted: str) -> int: ...
    def get_request(self, state: State, request_id: str) -> RequestDetail | None: ...
    def get_cache(self, state: State) -> CacheView: ...


class AdminService(admin_pb2_grpc.AdminServicer):  # type: ignore[misc]
    def __init__(self, engine: Engine, streams: LiveStreams, views: Views) -> None:
        self._engine = engine
        self._streams = streams
        self._views = views

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: Context
    ) -> pb.ListRequestsResponse:
        if request.state and request.state not in list(RequestState):
            raise RequestRejected("state", request.state, "empty, " + ", ".join(RequestState))
        if request.limit < 0:
            raise RequestRejected("limit", request.limit, f"at least 0; 0 is {DEFAULT_LIMIT}")
        wanted, limit = request.state, request.limit or DEFAULT_LIMIT
        views, total = await asyncio.wrap_future(
            self._engine.ask(
                lambda state: (
                    self._views.list_requests(state, wanted, limit),
                    self._views.count_requests(state, wanted),
                )
            )
        )
        found = [self._summary(view) for view in views]
        if wanted in ("", RequestState.PENDING):
            # behind those that the engine knows, though some of these may have come before
            waiting = self._streams.waiting_here()
            total += len(waiting)
            found += map(_summary_of_waiting, itertools.islice(waiting, limit - len(found)))
        return pb.ListRequestsResponse(requests=found, total=total)

    async def GetRequest(
        self, request: pb.GetRequestRequest, context: Context
    ) -> pb.GetRequestResponse:
        request_id = request.request_id
        detail = await asyncio.wrap_future(
            self._engine.ask(lambda state: self._views.get_request(state, request_id))
        )
        if detail is not None:
            return pb.GetRequestResponse(
                summary=self._summary(detail.summary),
                row=detail.row,
                plans_in_flight=detail.plans_in_flight,
                token_ids=detail.token_ids,
                block_tables=[
                    pb.BlockTable(
                        group=table.group, first_position=table.first_position, blocks=table.blocks
                    )
                    for table in detail.block_tables
                ],
            )
        stream = self._streams.get(request_id)
        if stream is None or stream.is_submitted:
            raise UnknownRequest(request_id)
        return pb.GetRequestResponse(summary=_summary_of_waiting(stream))

    async def GetCache(self, request: pb.GetCacheRequest, context: Context) -> pb.GetCacheResponse:
        cache = await asyncio.wrap_future(self._engine.ask(self._views.get_cache))
        response = pb.GetCacheResponse()
        _fill(response, cache)
        return response

    async def WatchSteps(self, request: pb.WatchStepsRequest, context: Context) -> None:
        with self._engine.steps.watch() as watcher:
            await context.send_initial_metadata(())  # "watching", before there is a step
            while True:
                report = await watcher.next()
                summary = pb.StepSummary(missed=watcher.missed)
                _fill(summary, report.view)
                _fill(summary, report)
                await context.write(summary)

    async def FlushCache(
        self, request: pb.FlushCacheRequest, context: Context
    ) -> pb.FlushCacheResponse:
        flushed = await asyncio.wrap_future(self._engine.flush_cache())
        return pb.FlushCacheResponse(blocks_flushed=flushed)

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        _later("Admin.Pause (refusing new requests for a while)")

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        _later("Admin.Resume (the end of a pause)")

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        _later("Admin.Drain (SIGTERM to the scheduler process drains it)")

    async def StartProfile(
        self, request: pb.StartProfileRequest, context: Context
    ) -> pb.StartProfileResponse:
        _later("Admin.StartProfile (profiling the worker)")

    async def StopProfile(
        self, request: pb.StopProfileRequest, context: Context
    ) -> pb.StopProfileResponse:
        _later("Admin.StopProfile (profiling the worker)")

    async def SetLogLevel(
        self, request: pb.SetLogLevelRequest, context: Context
    ) -> pb.SetLogLevelResponse:
        _later("Admin.SetLogLevel (start the scheduler with --log-level)")

    def _summary(self, view: RequestView) -> pb.RequestSummary:
        stream = self._streams.get(view.request_id)
        summary = pb.RequestSummary()
        _fill(summary, view)
        summary.age_seconds = 0.0 if stream is None else _age(stream)
        return summary


def _fill(message: Any, view: object) -> None:
    """Copies into the message every field that the view, a dataclass of the same names, has."""
    for spec in message.DESCRIPTOR.fields:
        value = getattr(view, spec.name, None)
        if value is None:
            continue
        if spec.message_type is not None:
            target = getattr(message, spec.name)
            for item in value:
                _fill(target.add(), item)
        else:
            setattr(message, spec.name, value)


def _summary_of_waiting(stream: LiveStream) -> pb.RequestSummary:
    """Of a request that waits for the model, and that the engine has not seen."""
    return pb.RequestSummary(
        request_id=stream.request_id, state=RequestState.PENDING, age_seconds=_age(stream)
    )


def _age(stream: LiveStream) -> float:
    return time.monotonic() - stream.arrival


def _later(what: str) -> NoReturn:
    raise NotImplementedYet(f"{what} comes in a later version")
