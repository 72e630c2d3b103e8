"""What swapping a block takes, and what choosing tokens takes."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from tests.gpu.card import DEVICE, DTYPE, has_room, seconds_of, seconds_on_device, sized
from tests.gpu.conftest import NewTable
from worker.kv.geometry import FULL_ATTENTION, CacheGroup, Geometry
from worker.kv.kv_pool import KvPool
from worker.kv.swap import SwapPool
from worker.step.sampler import SampleRows, sample, split_rows

BLOCKS = sized(256, 4)
VOCAB_SIZE = sized(152_064, 400)
ROWS = sized((1, 64, 256), (1, 3))


def test_swap_bandwidth(table: NewTable) -> None:
    """Whether a swap is plain copying: scattered blocks must come near one long run."""
    layers, kv_heads, head_dim = sized((32, 8, 128), (2, 2, 16))  # Llama-3.1-8B's
    group = CacheGroup(FULL_ATTENTION, tuple(range(layers)), 0, 1)
    geometry = Geometry((group,), layers, 32, kv_heads, head_dim, 16, itemsize=DTYPE.itemsize)
    num_chunks = 2 + 2 * BLOCKS
    if not has_room(num_chunks * geometry.chunk_bytes):
        pytest.skip("no room for the pool")
    pool = KvPool(geometry, num_chunks, DTYPE, DEVICE)
    swap = SwapPool(pool, BLOCKS)
    block = geometry.block_bytes(group)
    rows = table(
        "Swapping",
        ["what", "out, GB/s", "out, µs per block", "in, GB/s", "in, µs per block"],
        f"{BLOCKS} blocks of {block / 2**20:.2f} MiB, the host's launches included.",
    )
    device = np.random.default_rng(2).permutation(2 * BLOCKS)[:BLOCKS] + 2
    for what, blocks in (("scattered blocks", device), ("one run", 2 + np.arange(BLOCKS))):
        host, zeros = np.arange(BLOCKS), np.zeros(BLOCKS, np.int64)
        out = np.stack([zeros, blocks, host], 1).astype(np.int32)
        back = out[:, [0, 2, 1]]
        pool.memory.normal_()
        before = pool.blocks(0)[2:].clone()
        cells: list[str] = []
        for seconds in (
            seconds_of(partial(swap.take_out, out)),
            seconds_of(partial(swap.bring_in, back)),
        ):
            cells += [f"{BLOCKS * block / seconds / 1e9:.1f}", f"{seconds / BLOCKS * 1e6:.1f}"]
        assert torch.equal(pool.blocks(0)[2:], before)
        rows.add(what, *cells)


def test_sampler(table: NewTable) -> None:
    """The sampler runs outside of graphs, after every step: it must be small beside one."""
    rows = table(
        f"Sampling from {VOCAB_SIZE} tokens, ms",
        ["rows", "greedy", "from all tokens", "top_k 50, top_p 0.9"],
        "On the device; what the host needs to launch it is not in it.",
    )
    for count in ROWS:
        logits = torch.randn(count, VOCAB_SIZE, device=DEVICE)
        kinds = ((0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 50, 0.9))
        seconds = [
            seconds_on_device(partial(sample, logits, samples_of(count, *kind))) for kind in kinds
        ]
        rows.add(count, *(f"{1000 * second:.3f}" for second in seconds))


def samples_of(count: int, temperature: float, top_k: int, top_p: float) -> SampleRows:
    settings = {
        "temperature": np.full(count, temperature, np.float32),
        "top_k": np.full(count, top_k, np.int32),
        "top_p": np.full(count, top_p, np.float32),
        "min_p": np.zeros(count, np.float32),
    }
    each, u = np.arange(count), np.linspace(0, 0.999, count, dtype=np.float32)
    arrays = (each, each, *split_rows(settings, VOCAB_SIZE), u)
    return SampleRows(
        *(torch.from_numpy(array).to(DEVICE) for array in arrays),
        parameters={n: torch.from_numpy(array).to(DEVICE) for n, array in settings.items()},
    )
