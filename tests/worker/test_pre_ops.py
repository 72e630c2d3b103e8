"""Copies beside the forward: what must wait for what. Lanes are recorded, so no GPU is needed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from tests.support.plan_builder import plan_of
from worker.batch.inputs import prepare_inputs
from worker.batch.padding import row_shape
from worker.kv.geometry import FULL_ATTENTION, CacheGeometry, CacheGroup
from worker.kv.kv_pool import KvPool
from worker.kv.swap import SwapPool
from worker.step import pre_ops
from worker.step.pre_ops import PreOps

GROUP = CacheGroup(FULL_ATTENTION, (0,), 0, 1)
GEOMETRY = CacheGeometry((GROUP,), 1, 1, 1, 4, 4, itemsize=4)


@dataclass(frozen=True)
class FakeMark:
    lane: str

    def wait(self) -> None: ...

    def microseconds_since(self, earlier: object) -> int:
        return 0


@dataclass
class FakeLane:
    name: str
    waits: list[str] = field(default_factory=list)  # the lanes that it was told to wait for

    def use(self):
        return nullcontext()

    def mark(self) -> FakeMark:
        return FakeMark(self.name)

    def after(self, mark: FakeMark) -> None:
        self.waits.append(mark.lane)


class Steps:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.swap, self.compute = FakeLane("swap"), FakeLane("compute")
        monkeypatch.setattr(pre_ops, "new_lane", lambda _device: self.swap)
        pool = KvPool(GEOMETRY, 20, torch.float32, torch.device("cpu"))
        self.pool, self.host = pool, SwapPool(pool, 8)
        self.pre_ops = PreOps(pool, self.host, torch.device("cpu"))

    def run(self, block: int, **moves: list[list[int]]) -> tuple[bool, list[str], list[str]]:
        """A decode that reads and writes `block`: whether a mark came back, and who waited."""
        plan = plan_of(
            token_ids=[1], rows=[0], query_start_loc=[0, 1], seq_lens=[2], table_start=[[0, 1]],
            blocks=[block], first_positions=[[0]], **moves,
        )  # fmt: skip
        shape = row_shape(1, 1, 0, 1, 1)
        inputs = prepare_inputs(plan, [GROUP], 4, shape)
        self.swap.waits.clear()
        self.compute.waits.clear()
        mark = self.pre_ops.run(plan, inputs, self.compute)
        return mark is not None, list(self.swap.waits), list(self.compute.waits)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def test_steps_without_swaps_wait_for_nothing(steps: Steps) -> None:
    """The common step must not pay for the rare one."""
    assert steps.run(5) == (False, [], [])
    assert steps.run(5, copy=[[0, 5, 6]]) == (False, [], [])


def test_copies_out_run_beside_the_forward(steps: Steps) -> None:
    """That is what the lane is for; they begin when the steps before have written."""
    steps.run(7)
    assert steps.run(5, swap_out=[[0, 7, 0]]) == (True, ["compute"], [])


def test_forward_waits_before_it_overwrites_what_is_copied_out(steps: Steps) -> None:
    """A block given out too early would arrive in the swap pool with another request's KV."""
    assert steps.run(7, swap_out=[[0, 7, 0]]) == (True, ["compute"], ["swap"])
    steps.run(5, swap_out=[[0, 8, 1]])
    assert steps.run(8) == (False, [], ["swap"])  # one step later the copy may still run
    assert steps.run(8) == (False, [], [])  # two steps later it has ended
    steps.run(5, swap_out=[[0, 9, 2]])
    assert steps.run(5, copy=[[0, 5, 9]]) == (False, [], ["swap"])


def test_copies_in_begin_at_once_unless_the_memory_is_in_use(steps: Steps) -> None:
    """They may run beside the step before; the step that uses them waits."""
    steps.run(5)
    assert steps.run(6, swap_in=[[0, 0, 7]]) == (False, [], ["swap"])
    steps.run(9)
    assert steps.run(6, swap_in=[[0, 1, 9]]) == (False, ["compute"], ["swap"])


def test_bytes_arrive(steps: Steps) -> None:
    """The copies themselves: out, over, in."""
    blocks = steps.pool.blocks(0)
    blocks[7] = torch.arange(blocks[7].numel()).view(blocks[7].shape)
    kept = blocks[7].clone()
    steps.run(5, swap_out=[[0, 7, 3]])
    blocks[7] = np.nan
    steps.run(5, swap_in=[[0, 3, 12]], copy=[[0, 5, 6]])
    assert torch.equal(blocks[12], kept)
    assert torch.equal(blocks[6], blocks[5])
