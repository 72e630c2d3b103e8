"""The pool's layout, and copies of blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from worker.kv.geometry import FULL_ATTENTION, CacheGeometry, CacheGroup
from worker.kv.kv_pool import KvPool

CPU = torch.device("cpu")
GEOMETRY = CacheGeometry((CacheGroup(FULL_ATTENTION, (0, 1, 2), 0, 1),), 3, 4, 2, 8, 4, 4)


def test_layer_views_cover_the_pool_block_by_block():
    """A block must be one contiguous run of all layers: swap copies it as such."""
    pool = KvPool(GEOMETRY, 5, torch.float32, CPU)
    assert pool.num_bytes == 5 * GEOMETRY.chunk_bytes
    assert not pool.blocks(0).any()
    for layer in range(3):
        group, pages = pool.layer_views(layer)
        assert group == 0
        assert pages.shape == (5, 2, 2, 4, 8)
        assert pages[0].is_contiguous()
        pages[3] = layer + 1
    assert pool.blocks(0)[3].is_contiguous()
    assert pool.blocks(0)[3].flatten().unique_consecutive().tolist() == [1, 2, 3]
    assert not pool.blocks(0)[[0, 1, 2, 4]].any()


def test_copies_move_whole_blocks():
    """Copy-on-write of forks: all layers, K and V, and nothing else."""
    pool = KvPool(GEOMETRY, 6, torch.float32, CPU)
    pool.blocks(0).copy_(torch.randn(pool.blocks(0).shape))
    before = pool.blocks(0).clone()
    pool.copy_blocks(np.array([[0, 2, 5], [0, 3, 4]], np.int32))
    assert torch.equal(pool.blocks(0), before[[0, 1, 2, 3, 3, 2]])


def test_dtype_must_fit_the_geometry():
    """Else predicted and real bytes would differ silently."""
    with pytest.raises(ValueError, match="float16 has 2 bytes, geometry 4"):
        KvPool(GEOMETRY, 5, torch.float16, CPU)
