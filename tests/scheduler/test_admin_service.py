"""chairlift.v1.Admin: the engine's answers, as messages."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from protos import admin_pb2 as pb
from protos import inference_pb2
from scheduler_svc.engine.views import (
    BlockTableView,
    CacheGroupView,
    CacheView,
    RequestDetail,
    RequestView,
)
from tests.support.edge import Edge


def view(request_id: str, state: str = "DECODING", index: int = 0) -> RequestView:
    return RequestView(
        request_id=request_id,
        index=index,
        state=state,
        offloaded=False,
        priority=3,
        prompt_tokens=5,
        computed_tokens=7,
        completion_tokens=2,
        max_tokens=9,
        preemptions=1,
    )


async def test_list_requests(edge: Edge) -> None:
    """Arrival order, a filter, a limit, and the total before it."""
    edge.engine.answers["list_requests"] = [view("a"), view("b", "PENDING"), view("c")]
    everything = await edge.admin.ListRequests(pb.ListRequestsRequest())
    assert [summary.request_id for summary in everything.requests] == ["a", "b", "c"]
    assert everything.total == 3
    first = everything.requests[0]
    assert (first.state, first.priority, first.prompt_tokens) == ("DECODING", 3, 5)
    assert (first.computed_tokens, first.completion_tokens) == (7, 2)
    assert (first.max_tokens, first.preemptions) == (9, 1)
    some = await edge.admin.ListRequests(pb.ListRequestsRequest(state="DECODING", limit=1))
    assert ([summary.request_id for summary in some.requests], some.total) == (["a"], 2)


async def test_ages_come_from_the_streams(edge: Edge) -> None:
    """An old request is what one looks for at 3 a.m.; the core knows no wall clock."""
    request = inference_pb2.GenerateRequest(request_id="a", text="x")
    call = edge.inference.Generate(request)
    await call.read()
    edge.engine.answers["list_requests"] = [view("a"), view("gone")]
    listed = await edge.admin.ListRequests(pb.ListRequestsRequest())
    assert listed.requests[0].age_seconds > 0
    assert listed.requests[1].age_seconds == 0
    call.cancel()


async def test_requests_that_wait_for_the_model_are_listed(unready_edge: Edge) -> None:
    """A queue that forms while no worker is there must not be invisible."""
    unready_edge.engine.answers.update(list_requests=[], get_request={})
    call = unready_edge.inference.Generate(
        inference_pb2.GenerateRequest(request_id="early", text="x")
    )
    async with asyncio.timeout(10):
        while unready_edge.server.num_live == 0:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.005)
    listed = await unready_edge.admin.ListRequests(pb.ListRequestsRequest(state="PENDING"))
    assert [summary.request_id for summary in listed.requests] == ["early"]
    got = await unready_edge.admin.GetRequest(pb.GetRequestRequest(request_id="early"))
    assert (got.summary.state, got.HasField("row")) == ("PENDING", False)
    call.cancel()


@pytest.mark.parametrize("row", [None, 0, 4])
async def test_get_request(edge: Edge, row: int | None) -> None:
    """Row 0 and no row differ."""
    edge.engine.answers["get_request"] = {
        "a": RequestDetail(
            summary=view("a"),
            row=row,
            plans_in_flight=1,
            token_ids=[1, 2, 3],
            block_tables=[BlockTableView(group="full_attention", first_position=0, blocks=[8, 9])],
        )
    }
    got = await edge.admin.GetRequest(pb.GetRequestRequest(request_id="a"))
    assert got.summary.request_id == "a"
    assert (got.row if got.HasField("row") else None) == row
    assert (got.plans_in_flight, list(got.token_ids)) == (1, [1, 2, 3])
    assert got.block_tables[0] == pb.BlockTable(group="full_attention", blocks=[8, 9])


async def test_an_unknown_request(edge: Edge) -> None:
    """NOT_FOUND with the id, since one mistypes ids."""
    edge.engine.answers["get_request"] = {}
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await edge.admin.GetRequest(pb.GetRequestRequest(request_id="typo"))
    assert error.value.code() == grpc.StatusCode.NOT_FOUND
    assert "'typo'" in (error.value.details() or "")


async def test_get_cache(edge: Edge) -> None:
    """Every field that the view has arrives."""
    group = CacheGroupView(
        group="full_attention", num_layers=30, sliding_window=0, blocks_total=100,
        blocks_free=40, blocks_cached=0, blocks_owned=60,
    )  # fmt: skip
    edge.engine.answers["get_cache"] = CacheView(
        page_size=16, chunks_total=100, chunks_free=40, chunk_bytes=1 << 33, groups=[group],
        tokens_stored=900, utilisation=0.9375, prefix_queries=0, prefix_hits=0,
        swap_chunks_total=0, swap_chunks_free=0, offloads=0, restores=0, soft_resets=2,
        drafted_tokens=8, accepted_tokens=5,
    )  # fmt: skip
    got = await edge.admin.GetCache(pb.GetCacheRequest())
    assert (got.page_size, got.chunks_total, got.chunk_bytes) == (16, 100, 1 << 33)
    assert (got.tokens_stored, got.utilisation, got.soft_resets) == (900, 0.9375, 2)
    assert (got.groups[0].num_layers, got.groups[0].blocks_owned) == (30, 60)
    assert got.prefix_queries == 0
    assert (got.drafted_tokens, got.accepted_tokens) == (8, 5)


async def test_flush_cache(edge: Edge) -> None:
    """An operator who flushes wants to see that something happened."""
    edge.engine.cached_blocks = 7
    flushed = await edge.admin.FlushCache(pb.FlushCacheRequest())
    assert flushed.blocks_flushed == 7
    assert (await edge.admin.FlushCache(pb.FlushCacheRequest())).blocks_flushed == 0


async def test_siblings_are_listed_each(edge: Edge) -> None:
    """Which of the three is stuck? Only a summary of its own can say."""
    edge.engine.answers["list_requests"] = [view("a"), view("a", "PENDING", 2)]
    listed = await edge.admin.ListRequests(pb.ListRequestsRequest())
    assert [(one.index, one.state) for one in listed.requests] == [(0, "DECODING"), (2, "PENDING")]


@pytest.mark.parametrize(
    "request_",
    [pb.ListRequestsRequest(state="WAITING"), pb.ListRequestsRequest(limit=-1)],
)
async def test_bad_questions(edge: Edge, request_: pb.ListRequestsRequest) -> None:
    """A mistyped state must not read as "no requests"."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await edge.admin.ListRequests(request_)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Pause", pb.PauseRequest()),
        ("Resume", pb.ResumeRequest()),
        ("Drain", pb.DrainRequest()),
        ("StartProfile", pb.StartProfileRequest()),
        ("StopProfile", pb.StopProfileRequest()),
        ("SetLogLevel", pb.SetLogLevelRequest()),
    ],
)
async def test_what_comes_later(edge: Edge, method: str, request_: Any) -> None:
    """UNIMPLEMENTED with a sentence, rather than grpc's "Method not implemented!"."""
    call = getattr(edge.admin, method)(request_)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED
    details = error.value.details() or ""
    assert f"Admin.{method}" in details
    assert "not supported yet" in details
