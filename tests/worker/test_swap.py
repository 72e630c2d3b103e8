"""The swap pool: runs, copies both ways, and answers that go on after a stay outside."""

from __future__ import annotations

import math
import mmap

import numpy as np
import pytest
import torch

from tests.support.loading import configure, load
from tests.support.planner import GreedySample, Planner, Request, plan_of, serve
from tests.support.tiny_models import gemma3, llama, mistral
from tests.worker.conftest import NUM_SWAP_CHUNKS
from worker.kv.geometry import FULL_ATTENTION, SLIDING_ATTENTION, CacheGroup, Geometry
from worker.kv.kv_pool import KvPool
from worker.kv.swap import SwapPool, _pinned, merged_runs
from worker.runner import Runner

# one full layer and two sliding ones: a chunk is two full blocks or one sliding block
GROUPS = (CacheGroup(FULL_ATTENTION, (2,), 0, 2), CacheGroup(SLIDING_ATTENTION, (0, 1), 8, 1))
GEOMETRY = Geometry(GROUPS, 3, 4, 2, 8, 4, 4)


def triples(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array(rows, np.int32).reshape(-1, 3)


def test_neighbours_on_both_sides_are_one_run():
    """One copy per block would be thousands of launches for a long request."""
    pairs = triples((0, 7, 3), (0, 5, 1), (0, 6, 2), (0, 9, 4), (1, 5, 3))
    # 5→1, 6→2, 7→3 are one run of the first group; 9→4 has a gap before it; then the second group
    assert list(merged_runs(pairs, [10, 20])) == [(50, 10, 30), (90, 40, 10), (100, 60, 20)]
    assert list(merged_runs(triples(), [10, 20])) == []


def test_neighbours_on_one_side_only_are_no_run():
    """A merged copy would overwrite somebody else's block."""
    assert len(list(merged_runs(triples((0, 5, 1), (0, 6, 3)), [10]))) == 2
    assert len(list(merged_runs(triples((0, 5, 2), (0, 6, 1)), [10]))) == 2


def test_blocks_come_back_as_they_went():
    """Every group's blocks, to other places; nothing else changes on either side."""
    pool = KvPool(GEOMETRY, 8, torch.float32, torch.device("cpu"))
    swap = SwapPool(pool, 3)
    assert swap.num_bytes == 3 * GEOMETRY.chunk_bytes
    assert [swap.num_blocks(0), swap.num_blocks(1)] == [6, 3]
    pool.memory.normal_()
    before = pool.memory.clone()
    first = [pool.blocks(0)[5].clone(), pool.blocks(0)[6].clone(), pool.blocks(1)[4].clone()]
    swap.take_out(triples((0, 5, 0), (0, 6, 1), (1, 4, 2)))
    assert torch.equal(pool.memory, before)
    swap.bring_in(triples((0, 0, 4), (0, 1, 11), (1, 2, 7)))
    assert torch.equal(pool.blocks(0)[4], first[0])
    assert torch.equal(pool.blocks(0)[11], first[1])
    assert torch.equal(pool.blocks(1)[7], first[2])
    changed = (pool.blocks(1) != before.view_as(pool.blocks(1))).flatten(1).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [2, 5, 7]  # chunks


@pytest.mark.parametrize("make", [llama, mistral, gemma3])
def test_a_request_goes_on_after_a_stay_in_the_swap_pool(served, make, prompts):
    """Swapped and undisturbed answers are the same, through all groups: out, others use the
    blocks, in to other blocks, on."""
    prompt, count = prompts[2], 8
    plain = served(make)
    expected = serve(plain.runner, plain.planner, plain.sample, [prompt], [count])[0].tokens
    it = served(make)
    request = Request(prompt, count, row=3)
    it.runner.step(it.planner.plan([(request, 20)]))
    out, back = _move_away(it.planner, request)
    it.runner.step(plan_of(step_id=90, swap_out=out, **_no_tables(it.planner)))
    it.runner.pool.memory.fill_(math.nan)
    it.runner.step(plan_of(step_id=91, swap_in=back, **_no_tables(it.planner)))
    it.runner.pool.blocks(0)[: it.planner.geometry.groups[0].first_block] = 0
    while len(request.output) < count:
        left = request.num_tokens - request.num_computed
        result = it.runner.step(it.planner.plan([(request, left)]))
        assert result.is_finite.tolist() == [1]
        request.output.append(int(result.token_ids[0]))
    assert request.output == expected


def _move_away(planner: Planner, request: Request) -> tuple[np.ndarray, np.ndarray]:
    """swap_out and swap_in triples; the request's tables then name other blocks."""
    out, back, next_swap_chunk = [], [], 0
    for index, (group, table) in enumerate(
        zip(planner.geometry.groups, request.tables, strict=True)
    ):
        new = [planner.free_blocks[index].pop(0) for _ in table.blocks]
        size = group.blocks_per_chunk
        places = [next_swap_chunk * size + place for place in range(len(new))]
        next_swap_chunk += -(-len(new) // size)
        out += [(index, block, place) for block, place in zip(table.blocks, places, strict=True)]
        back += [(index, place, block) for place, block in zip(places, new, strict=True)]
        table.blocks = new
    assert next_swap_chunk <= NUM_SWAP_CHUNKS
    return triples(*out), triples(*back)


def _no_tables(planner: Planner) -> dict[str, np.ndarray]:
    num_groups = len(planner.geometry.groups)
    return {
        "table_start": np.zeros((num_groups, 1)),
        "first_positions": np.zeros((num_groups, 0)),
    }


def test_out_comes_before_in_and_in_before_copies(served):
    """One plan may take a block out, bring another into its place, and copy that: the order is
    part of the contract."""
    it = served(llama)
    blocks = it.runner.pool.blocks(0)
    blocks[5], blocks[6] = 5.0, 6.0
    it.runner.step(plan_of(swap_out=[[0, 6, 0]]))
    it.runner.step(plan_of(swap_out=[[0, 5, 1]], swap_in=[[0, 0, 5]], copy=[[0, 5, 8]]))
    assert (float(blocks[5].mean()), float(blocks[8].mean())) == (6.0, 6.0)
    it.runner.step(plan_of(swap_in=[[0, 1, 9]]))
    assert float(blocks[9].mean()) == 5.0


def test_ready_tells_how_large_it_is(saved):
    """The scheduler gives out swap blocks by this number."""
    settings = {"num_blocks": 10, "cpu_offload_space": 1 / 1024}
    loaded = load(saved(llama)[0], **settings)
    ready = Runner(loaded, configure(**settings), sample=GreedySample()).ready()
    assert ready.num_swap_chunks == 2**20 // ready.chunk_bytes


def test_memory_is_pinned_in_whole_pages_while_the_pool_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies from memory that is not pinned wait for the device; what stays pinned is lost."""
    pinned: dict[int, int] = {}

    class Cudart:
        def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:
            pinned[address] = size
            return 2 if size > 2**20 else 0

        def cudaHostUnregister(self, address: int) -> int:
            del pinned[address]
            return 0

    class Owner: ...

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    owner = Owner()
    memory = _pinned(owner, 5000)  # type: ignore[arg-type]
    assert pinned == {memory.data_ptr(): 5000}
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    del owner
    assert not pinned
    with pytest.raises(OSError, match=r"2\.0 MiB of cpu_offload_space cannot be pinned"):
        _pinned(Owner(), 2**21)  # type: ignore[arg-type]
