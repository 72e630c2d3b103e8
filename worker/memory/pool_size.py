"""The size of the KV pool: whole chunks of the memory that everything else leaves free.

The weights are loaded when this runs, so the device's free memory excludes them. From
max_memory_percent of the free memory are subtracted: what a step needs (step_memory.py) and, on the
CPU, the swap pool, which is in host memory otherwise. The rest is the KV pool, and its size decides
into which cache groups the layers are split (tiling.py).

Owns: the order of these decisions, refusals with numbers, the printable plan. Does not own: the
pools themselves (kv_pool.py, swap.py), the formulas for a step (step_memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import psutil  # type: ignore[import-untyped]  # its stubs are no dependency
import torch

from protos import link_pb2
from protos.plan import NUM_RESERVED_CHUNKS
from worker.kv.geometry import CacheGeometry
from worker.memory.step_memory import StepMemory, step_memory
from worker.model.load import LoadedModel
from worker.process import control_group

_DEFAULT_PERCENT: Final = {"cuda": 0.9, "cpu": 0.6, "mps": 0.6}
_MOST_SWAP: Final = 0.8  # of the host's free memory


class OutOfMemory(ValueError):
    """The device has too little memory for the settings; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use, and the sizes of both pools; `str` is a readable table."""

    free: int  # on the device, with the weights loaded
    percent: float  # share of `free` that may be used
    weights: int
    step: StepMemory
    geometry: CacheGeometry  # with the groups that suit the pool
    num_chunks: int  # including the reserved ones
    num_swap_chunks: int

    @property
    def pool(self) -> int:
        return self.num_chunks * self.geometry.chunk_bytes

    @property
    def swap(self) -> int:
        return self.num_swap_chunks * self.geometry.chunk_bytes

    @property
    def total(self) -> int:
        """Everything except the weights, on the device and in host memory."""
        return self.step.total + self.pool + self.swap

    @property
    def tokens(self) -> int:
        """Tokens that the pool holds, without the reserved chunks."""
        usable = (self.num_chunks - NUM_RESERVED_CHUNKS) * self.geometry.chunk_bytes
        return usable // self.geometry.model_block_bytes * self.geometry.page_size

    def __str__(self) -> str:
        rows = [
            ("weights (loaded)", self.weights),
            ("activations", self.step.activations),
            ("logits and sampling", self.step.logits),
            ("gathered keys, scores", self.step.gathered),
            ("step inputs", self.step.inputs),
            ("CUDA graphs", self.step.graphs),
            ("library workspaces", self.step.workspaces),
            ("KV pool", self.pool),
            ("swap pool (host)", self.swap),
        ]
        lines = [f"{name:<24}{size / 2**20:>12,.1f} MiB" for name, size in rows if size]
        num_groups = len(self.geometry.groups)
        lines.append(
            f"{self.num_chunks} chunks of {self.geometry.chunk_bytes / 2**20:,.3f} MiB in "
            f"{num_groups} cache group{'s' * (num_groups > 1)} hold {self.tokens:,} tokens; "
            f"{self.free / 2**20:,.1f} MiB were free, {self.percent:.0%} of it may be used"
        )
        return "\n".join(lines)


def plan_memory(
    loaded: LoadedModel,
    configure: link_pb2.Configure,
    attention: str,
    free: int | None = None,
    host_free: int | None = None,
) -> MemoryPlan:
    """The sizes of both pools, and the cache groups. `attention` is the backend's name.

    `free` and `host_free` (bytes) are measured unless given. With num_blocks, exactly that many
    blocks are planned; else as many as fit, but not more than max_requests_per_batch requests of
    max_model_len tokens can use. Raises OutOfMemory, or ValueError for an invalid setting.
    """
    is_host = loaded.device.type == "cpu"
    free = free_memory(loaded.device) if free is None else free
    if host_free is None:
        host_free = free if is_host else free_memory(torch.device("cpu"))
    percent = configure.max_memory_percent or _DEFAULT_PERCENT[loaded.device.type]
    if not 0 < percent <= 1:
        raise ValueError(f"max_memory_percent is {percent}; it must be above 0 and at most 1")
    if configure.num_blocks < 0:
        raise ValueError(f"num_blocks is {configure.num_blocks}; it must be positive, or 0 = auto")
    swap_bytes = _swap_bytes(configure, host_free)
    budget = int(free * percent) - (swap_bytes if is_host else 0)

    geometry = loaded.geometry
    step = step_memory(loaded, configure, attention, geometry)
    wanted = _wanted_chunks(geometry, loaded, configure) * geometry.chunk_bytes
    geometry = geometry.fitted(max(0, min(wanted, budget - step.total)))
    step = step_memory(loaded, configure, attention, geometry)  # inputs grow with the groups
    available = max(0, budget - step.total)
    num_chunks = _wanted_chunks(geometry, loaded, configure)
    if not configure.num_blocks:
        num_chunks = min(num_chunks, available // geometry.chunk_bytes)
    plan = MemoryPlan(
        free=free,
        percent=percent,
        weights=weight_bytes(loaded),
        step=step,
        geometry=geometry,
        num_chunks=max(num_chunks, NUM_RESERVED_CHUNKS + 1),
        num_swap_chunks=swap_bytes // geometry.chunk_bytes,
    )
    if plan.pool > available:
        taken = f", after {step.total / 2**20:,.1f} MiB for a step"
        if is_host and swap_bytes:
            taken += f" and {swap_bytes / 2**20:,.1f} MiB for swapping"
        raise OutOfMemory(
            f"the KV pool needs {plan.pool / 2**20:,.1f} MiB ({plan.num_chunks} chunks of "
            f"{geometry.chunk_bytes / 2**20:,.3f} MiB), but of {free / 2**20:,.1f} MiB free on "
            f"{loaded.device} at {percent:.0%}{taken}, {available / 2**20:,.1f} MiB are left: "
            f"lower max_batch_tokens (now {configure.max_batch_tokens}), max_requests_per_batch "
            f"(now {configure.max_requests_per_batch}), num_blocks (now {configure.num_blocks}) or "
            f"cpu_offload_space (now {configure.cpu_offload_space:g} GiB), or raise "
            f"max_memory_percent"
        )
    if swap_bytes and not plan.num_swap_chunks:
        raise ValueError(
            f"cpu_offload_space is {configure.cpu_offload_space:g} GiB, less than one chunk of "
            f"{geometry.chunk_bytes / 2**20:,.3f} MiB; allowed: 0 (off), or at least one chunk"
        )
    return plan


def _swap_bytes(configure: link_pb2.Configure, host_free: int) -> int:
    space = configure.cpu_offload_space
    if not space >= 0:
        raise ValueError(f"cpu_offload_space is {space} GiB; it must be at least 0")
    if space * 2**30 > _MOST_SWAP * host_free:
        raise OutOfMemory(
            f"cpu_offload_space is {space:g} GiB, but of {host_free / 2**30:,.2f} GiB free in the "
            f"host's memory at most {_MOST_SWAP:.0%} may be used for it: "
            f"{_MOST_SWAP * host_free / 2**30:,.2f} GiB"
        )
    return int(space * 2**30)


def _wanted_chunks(
    geometry: CacheGeometry, loaded: LoadedModel, configure: link_pb2.Configure
) -> int:
    """Chunks for num_blocks if set, else as many as can be used; including the reserved ones."""
    if configure.num_blocks:
        return NUM_RESERVED_CHUNKS + geometry.chunks_for_blocks(configure.num_blocks)
    useful = configure.max_requests_per_batch * geometry.chunks_for_tokens(loaded.max_model_len)
    return NUM_RESERVED_CHUNKS + useful


def weight_bytes(loaded: LoadedModel) -> int:
    """Bytes of all parameters and buffers, tied ones counted once."""
    tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def free_memory(device: torch.device) -> int:
    """Free bytes: on CUDA the driver's number, after torch has released its cache; on the CPU what
    is available without swapping, within the limits of control groups, which psutil does not
    know."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # a former runner's pool may fill most of the device
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    allowed = control_group.free_memory()
    return available if allowed is None else min(available, allowed)
