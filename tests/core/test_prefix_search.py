"""What the prefix cache's search costs and finds: work is counted, not timed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_svc.core.memory import block_names
from scheduler_svc.core.memory.prefix_cache import PrefixCache
from scheduler_svc.core.request import Hit, NewRequest, Request
from scheduler_svc.core.step.head_start import admission
from tests.support.occupied import occupy
from tests.support.random_requests import random_requests
from tests.support.simulation import Setup, Simulation, run_workload
from tests.support.without_model import without_model

HYBRID = ((0, 1), (30, 1))


class CountingDict(dict[Any, Any]):
    """Counts look-ups."""

    num_asked = 0

    def __contains__(self, key: object) -> bool:
        CountingDict.num_asked += 1
        return super().__contains__(key)

    def __getitem__(self, key: object) -> Any:
        CountingDict.num_asked += 1
        return super().__getitem__(key)

    def get(self, key: object, default: Any = None) -> Any:
        CountingDict.num_asked += 1
        return super().get(key, default)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], int]:
    """Runs something; how many names it made and looked up."""
    hashes: list[int] = []
    plain = block_names.hashlib.blake2b

    def counted(*args: Any, **kwargs: Any) -> Any:
        hashes.append(1)
        return plain(*args, **kwargs)

    monkeypatch.setattr(block_names.hashlib, "blake2b", counted)

    def run(action: Callable[[], object]) -> int:
        CountingDict.num_asked = 0
        hashes.clear()
        action()
        return CountingDict.num_asked + len(hashes)

    return run


def simulation(num_blocks: int, groups: tuple[tuple[int, int], ...]) -> Simulation:
    sim = Simulation(
        Setup(num_blocks=num_blocks, groups=groups, max_batch_tokens=64, max_requests=32,
              max_model_len=8192, safety_margin=0.0, vocab_size=50_000)
    )  # fmt: skip
    sim.worker.step = without_model  # type: ignore[method-assign]
    for allocator in sim.state.memory.groups:
        allocator.block_of = CountingDict(allocator.block_of)
    sim.state.memory.prefix_cache._promised = CountingDict()
    return sim


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, count).tolist()


@pytest.mark.parametrize("groups", [((0, 1),), HYBRID])
def test_who_waits_for_a_prefix_asks_one_name_a_step(
    groups: tuple[tuple[int, int], ...], count: Callable[[Callable[[], object]], int]
) -> None:
    """A burst with a long prefix makes every step search it again for everybody who waits."""
    sim, waiting = simulation(3000, groups), 100
    prefix = tokens(2000)
    for number in range(waiting + 1):
        sim.submit(NewRequest(f"r{number}", [*prefix, *tokens(9, number)], 4))
    cache, pending = sim.state.memory.prefix_cache, sim.state.pending
    costs = []
    sim.turn()
    while not sim.state.rows.is_decoding[0]:
        assert len(pending) == waiting
        costs.append(count(lambda: [cache.match(request) for request in pending.in_order()]))
        sim.turn()
    assert len(costs) > 20
    assert costs[0] < 30 * waiting  # what is there after one step, found once
    assert max(costs[1:]) <= 2 * waiting
    sim.run()
    assert sim.outcome.cached_tokens["r1", 0] == 2000


@pytest.mark.parametrize("groups", [((0, 1),), HYBRID])
@pytest.mark.parametrize("is_running", [True, False], ids=["owned", "cached"])
def test_the_first_in_line_is_not_searched_for_anew(
    groups: tuple[tuple[int, int], ...],
    is_running: bool,
    count: Callable[[Callable[[], object]], int],
) -> None:
    """A first in line that finds no room costs every step as much as its prefix is long."""
    sim = simulation(3000, groups)
    prefix = tokens(2000)
    sim.submit(NewRequest("a", prefix, 400 if is_running else 1))
    if not is_running:
        sim.run()
    sim.submit(NewRequest("b", [1, 2, 3], 400))
    while len(sim.state.rows.running) < 1 + is_running or not sim.state.rows.is_decoding[0]:
        sim.turn()
    device = sim.state.memory.device
    free = device.chunks.num_free if is_running else len(device.chunks.clean)
    others = occupy(device, free - 3)
    first = sim.submit(NewRequest("first", [*prefix, *tokens(300, 2)], 4))
    assert first is not None
    assert count(lambda: admission(sim.state, first)) > 400
    assert first.hit is not None
    assert first.hit.num_pages == 500
    for _ in range(5):
        assert count(lambda: admission(sim.state, first)) < 10
        twin = copy.deepcopy(sim.scheduler)
        assert count(twin.plan) < 10
        if is_running:  # else the cached blocks that nobody shares make room for it
            assert not twin.state.in_flight[-1].admitted
    device.give(0, others)
    sim.run()


def test_an_offloaded_first_in_line_is_not_searched_for_anew(
    count: Callable[[Callable[[], object]], int],
) -> None:
    """The same for one whose KV is in the swap pool."""
    sim = Simulation(Setup(num_blocks=700, swap_chunks=600, max_model_len=4096, vocab_size=50_000))
    sim.worker.step = without_model  # type: ignore[method-assign]
    sim.submit(NewRequest("a", tokens(2000), 9))
    while not sim.state.rows.is_decoding[0]:
        sim.turn()
    (request,) = sim.state.requests["a"]
    sim.state.preempt([request])
    assert request.swapped is not None
    (allocator,) = sim.state.memory.groups
    allocator.block_of = CountingDict(allocator.block_of)
    device = sim.state.memory.device
    others = occupy(device, device.chunks.num_free)
    assert count(sim.scheduler.plan) > 400
    assert count(sim.scheduler.plan) < 10
    device.give(0, others)
    sim.run()


def test_prompts_that_begin_alike_are_hashed_once(
    count: Callable[[Callable[[], object]], int],
) -> None:
    """Each request of a burst stops the steps for as long as hashing its prompt takes."""
    sim = simulation(3000, ((0, 1),))
    prefix = tokens(4000)
    assert count(lambda: sim.submit(NewRequest("a", prefix, 1))) >= 1000
    for number, length in enumerate((4000, 3000, 100)):
        new = NewRequest(f"r{number}", prefix[:length] + tokens(8, number), 1)
        assert count(lambda new=new: sim.submit(new)) < 8  # type: ignore[misc]
    names = [list(sim.state.requests[f"r{number}"][0].names) for number in range(3)]
    sim.scheduler.lose_worker(sim.setup.geometry())  # which forgets the names
    sim.submit(NewRequest("again", prefix[:3000] + tokens(8, 1), 1))
    assert sim.state.requests["again"][0].names == names[1]
    assert names[0][:750] == names[1][:750] != names[0][1:751]


@pytest.mark.parametrize("groups", [((0, 1),), ((0, 2), (9, 3))])
@pytest.mark.parametrize("swap_chunks", [0, 12])
def test_what_is_remembered_is_what_a_new_search_finds(
    groups: tuple[tuple[int, int], ...], swap_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remembered hit shares blocks that hold something else by now, or misses what is there."""
    plain = PrefixCache.match
    found = []

    def match(self: PrefixCache, request: Request) -> Hit | None:
        hit = plain(self, request)
        remembered = request.hit, request.awaited
        request.hit = request.awaited = None
        anew = plain(self, request)
        request.hit, request.awaited = remembered
        assert (hit is None) == (anew is None)
        if hit is None or anew is None:
            return None
        assert hit.num_pages == anew.num_pages or (hit.num_pages < anew.num_pages and groups[1:])
        for group, (ours, theirs) in enumerate(zip(hit.blocks, anew.blocks, strict=True)):
            if not groups[group][0]:
                assert ours.tolist() == theirs[: len(ours)].tolist()
        found.append(hit.num_pages)
        return hit

    monkeypatch.setattr(PrefixCache, "match", match)
    for seed in range(2):
        setup = Setup(
            num_blocks=22, max_model_len=64, groups=groups, swap_chunks=swap_chunks,
            max_plans_in_flight=1 + seed % 2, vocab_size=4,
        )  # fmt: skip
        requests = random_requests(
            np.random.default_rng(seed), 40, vocab_size=4, prefixes=3, fork_share=0.2
        )
        run_workload(setup, requests, seed=seed, arrivals_per_turn=4, abort_share=0.1)
    assert sum(map(bool, found)) > 10
