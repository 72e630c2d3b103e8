"""The swap pool: runs, copies both ways, and answers that go on after a stay outside."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from protos.plan import NUM_RESERVED_CHUNKS, StepPlan
from tests.support.in_process import InProcess
from tests.support.loading import configure, load
from tests.support.plan_builder import plan_of
from tests.support.tiny_models import gemma3, llama, mistral
from worker.kv.geometry import FULL_ATTENTION, SLIDING_ATTENTION, CacheGeometry, CacheGroup
from worker.kv.kv_pool import KvPool
from worker.kv.swap import SwapPool, _pinned, merged_runs
from worker.runner import Runner

# one full layer and two sliding ones: a chunk is two full blocks or one sliding block
GROUPS = (CacheGroup(FULL_ATTENTION, (2,), 0, 2), CacheGroup(SLIDING_ATTENTION, (0, 1), 8, 1))
GEOMETRY = CacheGeometry(GROUPS, 3, 4, 2, 8, 4, 4)


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
    plain, it = (served(make, max_batch_tokens=20, max_requests=1) for _ in range(2))
    plain.core.submit_prompts(prompts[2], max_tokens=8)
    first, *rest = [plain.next_step() for _ in range(9)]
    it.step(first[0])
    out, back, moved = _moved(it, first[0])
    it.step(plan_of(step_id=90, swap_out=out, **_no_tables(it)))
    it.runner.pool.memory.fill_(math.nan)
    it.step(plan_of(step_id=91, swap_in=back, **_no_tables(it)))
    it.runner.pool.blocks(0)[: it.loaded.geometry.groups[0].first_block] = 0
    for plan, expected in rest:
        result = it.step(replace(plan, blocks=moved(plan)))
        assert result.is_finite.tolist() == [1]
        assert result.token_ids.tolist() == expected.token_ids.tolist()


def _moved(
    it: InProcess, plan: StepPlan
) -> tuple[np.ndarray, np.ndarray, Callable[[StepPlan], np.ndarray]]:
    """swap_out and swap_in triples that move the plan's blocks 50 chunks on, and what gives the
    blocks of later plans there."""
    sizes = [group.blocks_per_chunk for group in it.loaded.geometry.groups]
    usable = it.runner.pool.num_chunks - NUM_RESERVED_CHUNKS

    def moved(plan: StepPlan) -> np.ndarray:
        size = np.repeat(sizes, plan.table_start[:, -1] - plan.table_start[:, 0])
        chunk, place = np.divmod(plan.blocks, size)
        chunk = NUM_RESERVED_CHUNKS + (chunk - NUM_RESERVED_CHUNKS + 50) % usable
        return (chunk * size + place).astype(np.int32)

    groups = np.repeat(range(len(sizes)), plan.table_start[:, -1] - plan.table_start[:, 0])
    # a swap chunk for every block
    places = np.arange(len(groups)) * np.repeat(sizes, np.bincount(groups))
    out = np.stack([groups, plan.blocks, places], axis=1)
    return out, np.stack([groups, places, moved(plan)], axis=1), moved


def _no_tables(it: InProcess) -> dict[str, np.ndarray]:
    num_groups = len(it.loaded.geometry.groups)
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
    it.step(plan_of(swap_out=[[0, 6, 0]]))
    it.step(plan_of(swap_out=[[0, 5, 1]], swap_in=[[0, 0, 5]], copy=[[0, 5, 8]]))
    assert (float(blocks[5].mean()), float(blocks[8].mean())) == (6.0, 6.0)
    it.step(plan_of(swap_in=[[0, 1, 9]]))
    assert float(blocks[9].mean()) == 5.0


def test_ready_tells_how_large_it_is(saved):
    """The scheduler gives out swap blocks by this number."""
    settings = {"num_blocks": 10, "cpu_offload_space": 1 / 1024}
    loaded = load(saved(llama)[0], **settings)
    ready = Runner(loaded, configure(**settings)).ready()
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
