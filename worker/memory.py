"""How much KV memory fits: what everything else needs, then whole chunks of the rest.

The weights are loaded when this runs, so the device's free memory already lacks them. From
max_memory_percent of what is free come off: activations of the largest step, logits and what the
sampler makes of them, the step's input buffers. What remains is the pool.

Owns: the arithmetic and its printable form. Does not own: the pool itself (kv_pool.py). The
formulas count the largest tensors that live at the same time; M = max_batch_tokens, R =
max_requests_per_batch, a = bytes of one number of the model's dtype:

    activations  M * a * max(attention, mlp), in numbers per token:
                 attention = 3 * hidden + 2 * (H + 2 * Hkv) * D    residual, norm, output; q, k, v
                                                                  before and after RoPE
                 mlp       = 2 * hidden + 3 * intermediate         gate, up, their product
    logits       R * (hidden * a + vocab * (a + 12))               logits, float32 copy, the
                                                                  sampler's sorted copy and sums
    gathered     2 * Hkv * D * a * max_model_len + 5 * min(M, max_model_len) * max_model_len
                                                                  `reference` only: one request's
                                                                  K and V, and its mask
    inputs       io * M * (16 + 8 * G) + io * R * G * 4 * ceil(max_model_len / page_size)
                                                                  io = 2 with use_async_batching
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]  # its stubs are no dependency
import torch

from protos import link_pb2
from protos.plan import NUM_RESERVED_CHUNKS
from worker.geometry import Geometry
from worker.load import LoadedModel

_DEFAULT_PERCENT: Final = {"cuda": 0.9, "cpu": 0.6, "mps": 0.6}
_CGROUP: Final = Path("/sys/fs/cgroup")


class OutOfMemory(ValueError):
    """The device is too small for what is asked; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of everything, and the number of chunks; `str` is a table for a person."""

    free: int  # on the device, the weights already loaded
    percent: float  # of `free` that may be used
    weights: int
    activations: int
    logits: int
    gathered: int
    inputs: int
    chunk_bytes: int
    num_chunks: int  # the reserved ones included
    tokens: int  # that the pool holds, the reserved chunks not counted

    @property
    def pool(self) -> int:
        return self.num_chunks * self.chunk_bytes

    def __str__(self) -> str:
        rows = [
            ("weights (loaded)", self.weights),
            ("activations", self.activations),
            ("logits and sampling", self.logits),
            ("gathered keys and mask", self.gathered),
            ("step inputs", self.inputs),
            ("KV pool", self.pool),
        ]
        lines = [f"{name:<24}{size / 2**20:>12,.1f} MiB" for name, size in rows if size]
        lines.append(
            f"{self.num_chunks} chunks of {self.chunk_bytes / 2**20:,.3f} MiB hold "
            f"{self.tokens:,} tokens; {self.free / 2**20:,.1f} MiB were free, "
            f"{self.percent:.0%} of it may be used"
        )
        return "\n".join(lines)


def plan_memory(
    loaded: LoadedModel, configure: link_pb2.Configure, attention: str, free: int | None = None
) -> MemoryPlan:
    """How many chunks the pool gets. `attention` is the backend's name.

    `free` bytes are asked of the device unless given. With num_blocks, exactly that many blocks
    are planned; else as many as fit, but never more than max_requests_per_batch requests of
    max_model_len tokens can use. Raises OutOfMemory, or ValueError for a bad max_memory_percent.
    """
    free = free_memory(loaded.device) if free is None else free
    percent = configure.max_memory_percent or _DEFAULT_PERCENT[loaded.device.type]
    if not 0 < percent <= 1:
        raise ValueError(f"max_memory_percent is {percent}; it must be above 0 and at most 1")
    geometry = loaded.geometry
    config = loaded.model.config.get_text_config()
    activations = configure.max_batch_tokens * _activation_bytes(config, geometry)
    logits = configure.max_requests_per_batch * (
        config.hidden_size * geometry.itemsize + loaded.vocab_size * (geometry.itemsize + 12)
    )
    gathered = _gathered_bytes(loaded, configure) if attention == "reference" else 0
    inputs = _input_bytes(loaded, configure)

    available = int(free * percent) - activations - logits - gathered - inputs
    fitting = max(0, available // geometry.chunk_bytes)
    num_chunks = _wanted_chunks(loaded, configure, fitting)
    if num_chunks > fitting or fitting <= NUM_RESERVED_CHUNKS:
        raise OutOfMemory(
            f"the KV pool needs {_mib(max(num_chunks, NUM_RESERVED_CHUNKS + 1), geometry)}, but of "
            f"{free / 2**20:,.1f} MiB free on {loaded.device} at {percent:.0%}, after "
            f"{(activations + logits + gathered + inputs) / 2**20:,.1f} MiB for a step, "
            f"{max(0, available) / 2**20:,.1f} MiB are left: lower max_batch_tokens (now "
            f"{configure.max_batch_tokens}), max_requests_per_batch (now "
            f"{configure.max_requests_per_batch}) or num_blocks (now {configure.num_blocks}), or "
            f"raise max_memory_percent"
        )
    usable = (num_chunks - NUM_RESERVED_CHUNKS) * geometry.chunk_bytes
    return MemoryPlan(
        free=free,
        percent=percent,
        weights=weight_bytes(loaded),
        activations=activations,
        logits=logits,
        gathered=gathered,
        inputs=inputs,
        chunk_bytes=geometry.chunk_bytes,
        num_chunks=num_chunks,
        tokens=usable // geometry.model_block_bytes * geometry.page_size,
    )


def weight_bytes(loaded: LoadedModel) -> int:
    """Bytes of all parameters and buffers; tied ones count once."""
    tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def free_memory(device: torch.device) -> int:
    """Free bytes: the driver's count on CUDA; on the CPU what is available without swapping,
    within the control group's limit, which a container has and psutil does not see."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = (_CGROUP / "memory.current").read_text().strip()
    except OSError:
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - int(used)))


def _wanted_chunks(loaded: LoadedModel, configure: link_pb2.Configure, fitting: int) -> int:
    geometry = loaded.geometry
    if configure.num_blocks < 0:
        raise ValueError(f"num_blocks is {configure.num_blocks}; it must be positive, or 0 = auto")
    if configure.num_blocks:
        return NUM_RESERVED_CHUNKS + geometry.chunks_for_blocks(configure.num_blocks)
    useful = configure.max_requests_per_batch * geometry.chunks_for_tokens(loaded.max_model_len)
    return min(fitting, NUM_RESERVED_CHUNKS + useful)


def _activation_bytes(config: Any, geometry: Geometry) -> int:
    """Per token of a step, with every layer's activations given back before the next layer."""
    hidden: int = config.hidden_size
    intermediate: int = getattr(config, "intermediate_size", None) or 4 * hidden
    heads = (geometry.num_heads + 2 * geometry.num_kv_heads) * geometry.head_dim
    return geometry.itemsize * max(3 * hidden + 2 * heads, 2 * hidden + 3 * intermediate)


def _gathered_bytes(loaded: LoadedModel, configure: link_pb2.Configure) -> int:
    geometry, longest = loaded.geometry, loaded.max_model_len
    keys_values = 2 * geometry.num_kv_heads * geometry.head_dim * geometry.itemsize * longest
    return keys_values + 5 * min(configure.max_batch_tokens, longest) * longest


def _input_bytes(loaded: LoadedModel, configure: link_pb2.Configure) -> int:
    num_groups = len(loaded.geometry.groups)
    pages = math.ceil(loaded.max_model_len / loaded.geometry.page_size)
    one = configure.max_batch_tokens * (16 + 8 * num_groups)
    one += configure.max_requests_per_batch * num_groups * 4 * pages
    return one * (2 if configure.use_async_batching else 1)


def _mib(num_chunks: int, geometry: Geometry) -> str:
    size = num_chunks * geometry.chunk_bytes / 2**20
    return f"{size:,.1f} MiB ({num_chunks} chunks of {geometry.chunk_bytes / 2**20:,.3f} MiB)"
