"""Summaries of steps: what they say, and that a slow watcher costs no memory."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from protos import admin_pb2 as pb
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.core.request import NewRequest
from scheduler_svc.engine.step_feed import QUEUE_LENGTH, StepFeed, StepReport, Watcher
from scheduler_svc.engine.step_view import StepView, view_step
from scheduler_svc.engine.views import get_cache
from tests.support.edge import Edge
from tests.support.engine_harness import Bench
from tests.support.simulated_run import Setup
from tests.support.simulation import Simulation


def view(step_id: int) -> StepView:
    return StepView(
        step_id=step_id,
        num_requests=3,
        num_tokens=7,
        num_prefilling=1,
        num_decoding=2,
        num_drafted=2,
        num_finished=0,
        num_running=4,
        num_pending=5,
        chunks_free=6,
        chunks_total=10,
        utilisation=0.5,
        preemptions=8,
    )


async def taken(watcher: Watcher) -> list[StepReport]:
    """All that is there."""
    reports = []
    while True:
        try:
            reports.append(await asyncio.wait_for(watcher.next(), 0.05))
        except TimeoutError:
            return reports


def test_a_step_tells_its_drafts() -> None:
    """A row that verifies looks like one that computes a prompt."""
    sim = Simulation(Setup())
    sim._guess = lambda request: [1, 2, 3]  # type: ignore[method-assign]
    sim.submit(NewRequest("a", [1, 2, 3], 20, speculate=3))
    sim.submit(NewRequest("b", [4, 5, 6], 20))
    sim.turn()
    sim.submit(NewRequest("c", [7, 8, 9], 20))
    sim.plan()
    told = view_step(sim.state, sim.state.in_flight[-1])
    assert (told.num_tokens, told.num_drafted) == (4 + 1 + 3, 3)
    assert (told.num_decoding, told.num_prefilling) == (2, 1)
    sim.absorb()
    cache = get_cache(sim.state)
    assert cache.drafted_tokens == 3
    assert cache.accepted_tokens == sim.state.requests["a"][0].num_output_tokens - 2


@pytest.mark.parametrize("depth", [1, 2])
async def test_every_step_is_told_with_its_rows(depth: int) -> None:
    """Prompts of 20 and 2 tokens, 4 tokens each, in steps of 16 tokens: who computed what."""
    bench = Bench(depth)
    bench.connect()
    with bench.engine.steps.watch() as watcher:
        bench.submit("long", list(range(20)))
        bench.submit("short", [1, 2])
        bench.serve()
        reports = await taken(watcher)
    views = [report.view for report in reports]
    assert [one.step_id for one in views] == list(range(len(views)))
    assert views[0].num_tokens == 16
    assert (views[0].num_prefilling, views[0].num_decoding, views[0].num_pending) == (1, 0, 1)
    assert (views[1].num_tokens, views[1].num_prefilling) == (6, 2)
    assert all(one.num_prefilling == one.num_finished == 0 for one in views[2:])
    # the first token of each comes with its last prompt token
    assert sum(one.num_decoding for one in views) == 2 * (4 - 1)
    assert all(
        one.num_requests == one.num_prefilling + one.num_decoding + one.num_finished
        for one in views
    )


async def test_the_pool_is_told_as_it_is_once_the_step_is_planned() -> None:
    """Pages of 4 tokens, 12 of them: 5 tokens hold two, of which 5/8 hold a token."""
    bench = Bench()
    bench.connect()
    with bench.engine.steps.watch() as watcher:
        bench.submit("a", [1, 2, 3, 4, 5])
        bench.serve()
        first = (await taken(watcher))[0].view
    assert (first.chunks_total, first.chunks_free) == (12, 10)
    assert first.utilisation == pytest.approx(5 / 8)


async def test_a_static_batch_tells_of_the_rows_that_it_wastes() -> None:
    """This is what the comparison of static with continuous batching is about."""
    bench = Bench(policy=POLICIES["static"])
    bench.connect()
    with bench.engine.steps.watch() as watcher:
        bench.submit("short", [1], max_tokens=2)
        bench.submit("long", [2], max_tokens=6)
        bench.serve()
        views = [report.view for report in await taken(watcher)]
    assert sum(one.num_finished for one in views) == 4
    assert {one.num_requests for one in views} == {2}


def test_times_come_from_one_clock() -> None:
    """seconds is plan to result; start_seconds lets a reader place it."""
    now = [100.0]
    feed = StepFeed(lambda: now[0])

    async def watch() -> StepReport:
        with feed.watch() as watcher:
            feed._planned[3] = (view(3), 107.0)
            now[0] = 109.5
            feed.returned(3, device_microseconds=2_000_000)
            return await watcher.next()

    report = asyncio.run(watch())
    assert (report.start_seconds, report.seconds, report.device_seconds) == (7.0, 2.5, 2.0)


async def test_a_slow_watcher_misses_the_oldest_and_is_told_how_many() -> None:
    """Or a watcher that sleeps would fill the scheduler's memory."""
    feed = StepFeed()
    with feed.watch() as watcher:
        for step_id in range(QUEUE_LENGTH + 5):
            feed._planned[step_id] = (view(step_id), 0.0)
            feed.returned(step_id, 0)
        await asyncio.sleep(0)
        assert (await watcher.next()).view.step_id == 5
        assert watcher.missed == 5


async def test_nobody_watches() -> None:
    """A server that nobody looks at must not pay for being looked at."""
    bench = Bench()
    bench.connect()
    with bench.engine.steps.watch() as watcher:
        pass
    bench.submit("a", [1])
    bench.serve()
    assert bench.engine.steps._planned == {}
    assert await taken(watcher) == []


async def test_a_lost_workers_plans_do_not_return() -> None:
    """The next worker counts from 0 again: its steps are not the lost one's."""
    bench = Bench()
    bench.connect()
    with bench.engine.steps.watch() as watcher:
        bench.submit("a", [1, 2, 3])
        bench.turn()
        assert list(bench.engine.steps._planned) == [0]
        bench.connect()
        bench.serve()
        steps = [report.view.step_id for report in await taken(watcher)]
    assert steps == list(range(len(steps)))
    assert bench.engine.steps._planned == {}


async def test_watch_steps(edge: Edge) -> None:
    """The RPC: metadata at once, every field, and an end when the caller leaves."""
    call = edge.admin.WatchSteps(pb.WatchStepsRequest())
    await call.initial_metadata()
    feed = edge.engine.steps
    feed._planned[9] = (view(9), feed._start + 1.0)
    feed.returned(9, 250_000)
    summary = await call.read()
    assert summary == pb.StepSummary(
        step_id=9,
        num_requests=3,
        num_tokens=7,
        num_prefilling=1,
        num_decoding=2,
        num_running=4,
        num_pending=5,
        chunks_free=6,
        chunks_total=10,
        utilisation=0.5,
        preemptions=8,
        num_drafted=2,
        start_seconds=summary.start_seconds,
        seconds=summary.seconds,
        device_seconds=0.25,
    )
    call.cancel()
    assert await call.code() == grpc.StatusCode.CANCELLED
    async with asyncio.timeout(10):
        while feed._watchers:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.005)


async def test_a_step_that_was_given_up_is_forgotten() -> None:
    """After a Fault the worker goes on counting; what it discarded never returns."""
    feed = StepFeed()
    with feed.watch() as watcher:
        feed._planned.update({7: (view(7), 0.0), 8: (view(8), 0.0)})
        feed.returned(8, 0)
        assert [report.view.step_id for report in await taken(watcher)] == [8]
    assert feed._planned == {}
