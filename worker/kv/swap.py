"""The swap pool: host memory for the KV of offloaded requests, in whole blocks.

One tensor, allocated at start; pinned if the KV pool is on CUDA, so that copies are plain DMA and
need not wait for one another. (Pinned by the driver's own call: torch's allocator of pinned memory
rounds up to a power of two, 33 GiB to 64.) It has the KV pool's layout, chunk by chunk: swap block
b of a group is in swap chunk `b // blocks_per_chunk`. A block is contiguous on both sides, so the
pairs of a step merge into a few runs.

Owns: the memory, the copies. Does not own: which swap block holds what (the scheduler), the size of
the pool (pool_size.py).
"""

from __future__ import annotations

import mmap
import weakref

import torch

from protos.plan import Int32
from worker.kv.kv_pool import KvPool, merged_runs


class SwapPool:
    """`num_chunks` chunks, 0 or more, for blocks of `pool`."""

    def __init__(self, pool: KvPool, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self._pool = pool
        num_bytes, dtype = num_chunks * pool.geometry.chunk_bytes, pool.memory.dtype
        # not zeroed: blocks are written before they are read
        if num_bytes and pool.memory.device.type == "cuda":
            self._memory = _pinned(self, num_bytes).view(dtype)
        else:
            self._memory = torch.empty(num_bytes // dtype.itemsize, dtype=dtype)

    @property
    def num_bytes(self) -> int:
        return self._memory.numel() * self._memory.itemsize

    def num_blocks(self, group: int) -> int:
        return self.num_chunks * self._pool.geometry.groups[group].blocks_per_chunk

    def take_out(self, swap_out: Int32) -> None:
        """Copies blocks out of the pool; `swap_out` is [O, 3] (group, block, swap block)."""
        for source, target, size in merged_runs(swap_out, self._pool.block_items):
            self._memory[target : target + size].copy_(
                self._pool.memory[source : source + size], non_blocking=True
            )

    def bring_in(self, swap_in: Int32) -> None:
        """Copies blocks back into the pool; `swap_in` is [N, 3] (group, swap block, block).

        On CUDA both directions run in the current stream without waiting, so a block that the same
        plan swaps out and in is intact.
        """
        for source, target, size in merged_runs(swap_in, self._pool.block_items):
            self._pool.memory[target : target + size].copy_(
                self._memory[source : source + size], non_blocking=True
            )


def _pinned(owner: SwapPool, num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] in memory pages of its own, pinned until `owner` is deleted."""
    memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    error = int(cudart.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    if error:
        raise OSError(
            f"the {num_bytes / 2**20:,.1f} MiB of cpu_offload_space cannot be pinned: CUDA error "
            f"{error} from cudaHostRegister (check ulimit -l and the container's memory limit)"
        )
    unpin = weakref.finalize(owner, cudart.cudaHostUnregister, memory.data_ptr())
    unpin.atexit = False  # at exit the driver does it
    return memory
