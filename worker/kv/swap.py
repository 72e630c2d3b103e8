"""The swap pool: host memory that holds the KV of offloaded requests, in whole blocks.

One tensor, allocated at start; pinned where the KV pool is on CUDA, so that copies are plain DMA
and need not wait for one another. (Pinned by the driver's own call: torch's allocator of pinned
memory rounds up to a power of two, which for 33 GiB is 64.) It has the KV pool's layout, chunk for
chunk: swap block b of a group lies in swap chunk `b // blocks_per_chunk`. A block is one contiguous
run of bytes on both sides, so all pairs of a step become a few runs: neighbours on both sides are
copied as one.

Owns: the memory, the copies. Does not own: which swap block holds what (the scheduler), how large
the pool may be (memory.py).
"""

from __future__ import annotations

import mmap
import weakref

import torch

from protos.plan import Int32
from worker.kv.kv_pool import KvPool, merged_runs


class SwapPool:
    """`num_chunks` chunks beside `pool`; none at all is fine."""

    def __init__(self, pool: KvPool, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self._pool = pool
        num_bytes, dtype = num_chunks * pool.geometry.chunk_bytes, pool.memory.dtype
        # not zeroed: only what was written is ever read
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
        """Copy blocks out of the pool, `swap_out` being [O, 3] (group, block, swap block)."""
        for source, target, size in merged_runs(swap_out, self._pool.block_items):
            self._memory[target : target + size].copy_(
                self._pool.memory[source : source + size], non_blocking=True
            )

    def bring_in(self, swap_in: Int32) -> None:
        """Copy blocks back, `swap_in` being [N, 3] (group, swap block, block).

        On CUDA both ways run on the current stream without waiting, so a block that is taken out
        and brought in by the same plan arrives whole.
        """
        for source, target, size in merged_runs(swap_in, self._pool.block_items):
            self._pool.memory[target : target + size].copy_(
                self._memory[source : source + size], non_blocking=True
            )


def _pinned(owner: SwapPool, num_bytes: int) -> torch.Tensor:
    """Whole pages of memory that nothing else shares, uint8; pinned until `owner` goes."""
    memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    error = int(cudart.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    if error:
        raise OSError(
            f"the {num_bytes / 2**20:,.1f} MiB of cpu_offload_space cannot be pinned: CUDA error "
            f"{error} of cudaHostRegister (see ulimit -l and the container's memory limit)"
        )
    unpin = weakref.finalize(owner, cudart.cudaHostUnregister, memory.data_ptr())
    unpin.atexit = False  # the driver does it then
    return memory
