"""The memory of one full step besides weights and KV, in bytes.

The formulas count the tensors that are alive at the same time in an eager forward of a transformers
model under our attention, at the peak; every layer frees its own before the next one starts.
M = max_batch_tokens, R = max_requests_per_batch, L = max_model_len, G = cache groups, a = bytes of
one number of the model's dtype, b = of one number in the pool, E experts of which a token uses k:

    activations  M * a * (norm + max(attention, mlp, experts)), in numbers per token:
                 norm      = residual, its float32 copy, square and product
                 attention = hidden + 4 * (H + Hkv) * D + 2 * Hkv * D    q, k, v; q and k again,
                                                                  halves rotated, and products
                 mlp       = hidden + 4 * intermediate            gate and up, activation, product
                 experts   = k * (3 * hidden + 7 * intermediate) + 3 * E, and 8 * k * E bytes
    logits       R * (hidden * a + vocab * (2 * a + 16)) + 50 * min(R * vocab, 2^22)
                                                                  logits and a copy, float32,
                                                                  scaled, sums; sorted ones
    gathered     L * D * (4 * Hkv * b + 2 * H * (a + 4)) + 16 * min(H * min(M, L) * L, 2^24)
                                                                  `reference` only: one request's
                                                                  K and V, and its scores; K and V
                                                                  again, L * D * 2 * Hkv * a, if the
                                                                  pool has another dtype
    inputs       io * (M * (48 + 24 * G) + R * (128 + 8 * pages of all tables))
                                                                  io = 2 sets, and static ones
                                                                  where graphs replay
    graphs       activations + logits + 256 MiB                   the memory that all graphs share,
                                                                  as large as the largest needs
    workspaces   fixed: what matrix libraries and allocators reserve

Owns: these formulas. Does not own: what follows from their sum (pool_size.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Final

from protos import link_pb2
from worker.attention.reference import MOST_SCORES
from worker.kv.geometry import CacheGeometry
from worker.model.load import LoadedModel
from worker.step.sampler import MOST_AT_ONCE

_WORKSPACES: Final = 32 * 2**20
_GRAPH_OBJECTS: Final = 256 * 2**20  # vLLM reports 0.21 GiB for 35 decode graphs of a 1B model


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes, by use."""

    activations: int
    logits: int
    gathered: int  # 0 except with the reference backend
    inputs: int
    graphs: int  # 0 without graphs
    workspaces: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def step_memory(
    loaded: LoadedModel, configure: link_pb2.Configure, attention: str, geometry: CacheGeometry
) -> StepMemory:
    """The memory of a step of max_batch_tokens tokens; `attention` is the backend's name."""
    config = loaded.model.config.get_text_config()
    itemsize = loaded.dtype.itemsize
    activations = configure.max_batch_tokens * _activation_bytes(config, geometry, itemsize)
    logits = _logits_bytes(config.hidden_size, loaded.vocab_size, itemsize, configure)
    captures = loaded.device.type == "cuda" and configure.use_cuda_graph
    inputs = _input_bytes(loaded.max_model_len, configure, geometry)
    return StepMemory(
        activations=activations,
        logits=logits,
        gathered=_gathered_bytes(loaded, configure) if attention == "reference" else 0,
        inputs=inputs * (3 if captures else 2),
        graphs=activations + logits + _GRAPH_OBJECTS if captures else 0,
        workspaces=_WORKSPACES,
    )


def _activation_bytes(config: Any, geometry: CacheGeometry, itemsize: int) -> int:
    """Per token of a step."""
    a, hidden = itemsize, int(config.hidden_size)
    heads, kv_heads = geometry.num_heads, geometry.num_kv_heads
    attention = hidden + (4 * (heads + kv_heads) + 2 * kv_heads) * geometry.head_dim
    intermediate = _first(config, "intermediate_size", "n_inner") or 4 * hidden
    mlp = hidden + 4 * intermediate
    num_experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts")
    experts, routing = 0, 0
    if num_experts:
        taken = _first(config, "num_experts_per_tok", "num_experts_per_token", "moe_k") or 1
        of_expert = _first(config, "moe_intermediate_size") or intermediate
        experts = taken * (3 * hidden + 7 * of_expert) + 3 * num_experts
        routing = 8 * taken * num_experts
    norm = hidden * (a + 12)
    return norm + a * max(attention, mlp, experts) + routing


def _first(config: Any, *names: str) -> int:
    """The first of these settings that exists and is an integer; 0 if there is none."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return 0


def _logits_bytes(hidden: int, vocab: int, itemsize: int, configure: link_pb2.Configure) -> int:
    rows = min(configure.max_requests_per_batch, configure.max_batch_tokens)
    kept = rows * (hidden * itemsize + vocab * (2 * itemsize + 16))
    return kept + 50 * min(rows * vocab, max(MOST_AT_ONCE, vocab))


def _gathered_bytes(loaded: LoadedModel, configure: link_pb2.Configure) -> int:
    geometry, longest, a = loaded.geometry, loaded.max_model_len, loaded.dtype.itemsize
    of_token = 4 * geometry.num_kv_heads * geometry.itemsize + 2 * geometry.num_heads * (a + 4)
    if loaded.kv_dtype != loaded.dtype:
        of_token += 2 * geometry.num_kv_heads * a
    queries = min(configure.max_batch_tokens, longest)
    scores = geometry.num_heads * longest * queries
    at_once = max(MOST_SCORES, geometry.num_heads * longest)
    return longest * geometry.head_dim * of_token + 16 * min(scores, at_once)


def _input_bytes(longest: int, configure: link_pb2.Configure, geometry: CacheGeometry) -> int:
    pages = 0
    for group in geometry.groups:
        tokens = longest
        if group.sliding_window:
            tokens = min(longest, group.sliding_window + configure.max_batch_tokens)
        pages += math.ceil(tokens / geometry.page_size) + 1
    one = configure.max_batch_tokens * (48 + 24 * len(geometry.groups))
    one += configure.max_requests_per_batch * (128 + 8 * pages)
    return one
