"""Blocks that belong to nobody in particular: for a pool that is short."""

from __future__ import annotations

from protos.plan import Int32
from scheduler_svc.core.memory.block_pool import BlockPool


def occupy(pool: BlockPool, count: int, group: int = 0) -> Int32:
    """Takes that many blocks of a group, which `pool.give` returns. [count]"""
    needs = [0] * len(pool.allocators)
    needs[group] = count
    assert pool.take(needs), f"{count} blocks of group {group} are not there"
    return pool.draw(group, count)
