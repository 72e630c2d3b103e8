"""chairlift.v1.Admin: the service for operators.

Reads, and flushing the prefix cache, run in the engine's thread, which owns the state; they return
plain values (engine/views.py), whose fields have the names of admin.proto. RPCs of later versions
answer UNIMPLEMENTED with a sentence.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from protos import admin_pb2 as pb
from protos import admin_pb2_grpc
from scheduler_svc.core.request import RequestState
from scheduler_svc.engine import views
from scheduler_svc.errors import NotImplementedYet, RequestRejected, UnknownRequest
from scheduler_svc.front.streams import LiveStream, LiveStreams

if TYPE_CHECKING:
    from scheduler_svc.engine.engine import Engine

Context = grpc.aio.ServicerContext[Any, Any]

DEFAULT_LIMIT = 1000


class AdminService(admin_pb2_grpc.AdminServicer):  # type: ignore[misc]
    def __init__(self, engine: Engine, streams: LiveStreams) -> None:
        self._engine = engine
        self._streams = streams

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: Context
    ) -> pb.ListRequestsResponse:
        if request.state and request.state not in list(RequestState):
            raise RequestRejected("state", request.state, "empty, " + ", ".join(RequestState))
        if request.limit < 0:
            raise RequestRejected("limit", request.limit, f"at least 0; 0 is {DEFAULT_LIMIT}")
        wanted, limit = request.state, request.limit or DEFAULT_LIMIT
        submitted, total = await asyncio.wrap_future(
            self._engine.ask(
                lambda state: (
                    views.list_requests(state, wanted, limit),
                    views.count_requests(state, wanted),
                )
            )
        )
        found = [self._summary(view) for view in submitted]
        if wanted in ("", RequestState.PENDING):
            # after those that the engine knows, though some of these may have come earlier
            unsubmitted = self._streams.unsubmitted()
            total += len(unsubmitted)
            found += map(_unsubmitted_summary, itertools.islice(unsubmitted, limit - len(found)))
        return pb.ListRequestsResponse(requests=found, total=total)

    async def GetRequest(
        self, request: pb.GetRequestRequest, context: Context
    ) -> pb.GetRequestResponse:
        request_id = request.request_id
        detail = await asyncio.wrap_future(
            self._engine.ask(lambda state: views.get_request(state, request_id))
        )
        if detail is not None:
            return pb.GetRequestResponse(
                summary=self._summary(detail.summary),
                row=detail.row,
                plans_in_flight=detail.plans_in_flight,
                token_ids=detail.token_ids,
                block_tables=[pb.BlockTable(**asdict(table)) for table in detail.block_tables],
            )
        stream = self._streams.get(request_id)
        if stream is None or stream.is_submitted:
            raise UnknownRequest(request_id)
        return pb.GetRequestResponse(summary=_unsubmitted_summary(stream))

    async def GetCache(self, request: pb.GetCacheRequest, context: Context) -> pb.GetCacheResponse:
        cache = await asyncio.wrap_future(self._engine.ask(views.get_cache))
        return pb.GetCacheResponse(**asdict(cache))

    async def WatchSteps(self, request: pb.WatchStepsRequest, context: Context) -> None:
        with self._engine.steps.watch() as watcher:
            await context.send_initial_metadata(())  # the client knows that watching has begun
            while True:
                report = asdict(await watcher.next())
                view = report.pop("view")
                await context.write(pb.StepSummary(missed=watcher.missed, **view, **report))

    async def FlushCache(
        self, request: pb.FlushCacheRequest, context: Context
    ) -> pb.FlushCacheResponse:
        flushed = await asyncio.wrap_future(self._engine.flush_cache())
        return pb.FlushCacheResponse(blocks_flushed=flushed)

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        _refuse("Admin.Pause (refusing new requests for a while)")

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        _refuse("Admin.Resume (the end of a pause)")

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        _refuse("Admin.Drain (SIGTERM to the scheduler process drains it)")

    async def StartProfile(
        self, request: pb.StartProfileRequest, context: Context
    ) -> pb.StartProfileResponse:
        _refuse("Admin.StartProfile (profiling the worker)")

    async def StopProfile(
        self, request: pb.StopProfileRequest, context: Context
    ) -> pb.StopProfileResponse:
        _refuse("Admin.StopProfile (profiling the worker)")

    async def SetLogLevel(
        self, request: pb.SetLogLevelRequest, context: Context
    ) -> pb.SetLogLevelResponse:
        _refuse("Admin.SetLogLevel (start the scheduler with --log-level)")

    def _summary(self, view: views.RequestView) -> pb.RequestSummary:
        return pb.RequestSummary(**asdict(view), age_seconds=self._age(view.request_id))

    def _age(self, request_id: str) -> float:
        """In seconds; 0 for a request that is gone by now."""
        stream = self._streams.get(request_id)
        return 0.0 if stream is None else time.monotonic() - stream.arrival


def _unsubmitted_summary(stream: LiveStream) -> pb.RequestSummary:
    """Summary of a request that waits for the model, unknown to the engine so far."""
    return pb.RequestSummary(
        request_id=stream.request_id,
        state=RequestState.PENDING,
        age_seconds=time.monotonic() - stream.arrival,
    )


def _refuse(what: str) -> NoReturn:
    raise NotImplementedYet(f"{what} is not supported yet")
