"""The memory of one full step besides weights and KV, in bytes.

The formulas count the tensors that are alive at the same time in an eager forward of a transformers
model under our attention, at the peak; every layer frees its own before the next one starts.
M = max_batch_tokens, R = max_requests_per_batch, L = max_model_len, G = cache groups, a = bytes of
one number of the model's dtype, b = of one number in the pool, E experts of which a token uses k,
N = max_logits, S = min(N, samples_at_once):

    activations  M * a * (norm + max(attention, mlp, experts)), in numbers per token:
                 norm      = residual, its float32 copy, square and product
                 attention = hidden + 4 * (H + Hkv) * D + 2 * Hkv * D    q, k, v; q and k again,
                                                                  halves rotated, and products
                 mlp       = hidden + 4 * intermediate            gate and up, activation, product
                 experts   = k * (3 * hidden + 7 * intermediate) + 3 * E, and 8 * k * E bytes
    logits       N * (hidden + 2 * vocab) * a                     logits and a copy
                 + S * vocab * (a + 20)                           those of a slice of samples, as
                                                                  float32, unchanged, scaled, sums
                 + 50 * min(N * vocab, 2^22)                      sorted ones; log probabilities,
                                                                  masks
    gathered     L * D * (4 * Hkv * b + 2 * H * (a + 4)) + 16 * min(H * min(M, L) * L, 2^24)
                                                                  `reference` only: one request's
                                                                  K and V, and its scores; K and V
                                                                  again, L * D * 2 * Hkv * a, if the
                                                                  pool has another dtype
    inputs       io * (M * (48 + 24 * G) + R * (128 + 8 * pages of all tables) + N * 80
                 + R * vocab / 8 + 24 * min(R * min(L, vocab), 2^20))
                                                                  io = 2 sets, and static ones
                                                                  where graphs replay; masks,
                                                                  histories and biases (a step
                                                                  with more of them takes more)
    graphs       activations + logits + 256 MiB                   the memory that all graphs share,
                                                                  as large as the largest needs
    workspaces   fixed: what matrix libraries and allocators reserve

Owns: these formulas. Does not own: what follows from their sum (pool_size.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Final

import torch

from protos import link_pb2
from worker.attention.reference import MOST_SCORES
from worker.kv.geometry import CacheGeometry
from worker.model.load import LoadedModel
from worker.step.sampler import MOST_AT_ONCE

_WORKSPACES: Final = 32 * 2**20
_GRAPH_OBJECTS: Final = 256 * 2**20  # vLLM reports 0.21 GiB for 35 decode graphs of a 1B model


# Logits of one step, in numbers: a CPU computes as fast with fewer.
_MOST_LOGITS_CPU: Final = 2**24
_MOST_LOGITS_DEVICE: Final = 2**27
_FEWEST_SCORES: Final = 64  # tokens that are scored beside all rows, however large the vocabulary
_MOST_EDITS: Final = 2**20  # history and bias entries that are counted


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
    logits = _logits_bytes(loaded, configure, int(config.hidden_size))
    captures = loaded.device.type == "cuda" and configure.use_cuda_graph
    inputs = _input_bytes(loaded, configure, geometry)
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


def most_logits(vocab_size: int, configure: link_pb2.Configure, device: torch.device) -> int:
    """Tokens of one step whose logits are computed: all rows can sample, and beside them prompts be
    scored in chunks that are long enough to be fast."""
    numbers = _MOST_LOGITS_CPU if device.type == "cpu" else _MOST_LOGITS_DEVICE
    beside = max(_FEWEST_SCORES, numbers // vocab_size)
    return min(configure.max_batch_tokens, configure.max_requests_per_batch + beside)


def samples_at_once(vocab_size: int, max_requests: int) -> int:
    """Samples that are treated together: one of each row at least."""
    return max(max_requests, MOST_AT_ONCE // vocab_size)


def _logits_bytes(loaded: LoadedModel, configure: link_pb2.Configure, hidden: int) -> int:
    vocab, a = loaded.vocab_size, loaded.dtype.itemsize
    most = most_logits(vocab, configure, loaded.device)
    at_once = min(most, samples_at_once(vocab, configure.max_requests_per_batch))
    kept = most * (hidden + 2 * vocab) * a + at_once * vocab * (a + 20)
    return kept + 50 * min(most * vocab, max(MOST_AT_ONCE, vocab))


def _gathered_bytes(loaded: LoadedModel, configure: link_pb2.Configure) -> int:
    geometry, longest, a = loaded.geometry, loaded.max_model_len, loaded.dtype.itemsize
    of_token = 4 * geometry.num_kv_heads * geometry.itemsize + 2 * geometry.num_heads * (a + 4)
    if loaded.kv_dtype != loaded.dtype:
        of_token += 2 * geometry.num_kv_heads * a
    queries = min(configure.max_batch_tokens, longest)
    scores = geometry.num_heads * longest * queries
    at_once = max(MOST_SCORES, geometry.num_heads * longest)
    return longest * geometry.head_dim * of_token + 16 * min(scores, at_once)


def _input_bytes(
    loaded: LoadedModel, configure: link_pb2.Configure, geometry: CacheGeometry
) -> int:
    longest, vocab = loaded.max_model_len, loaded.vocab_size
    pages = 0
    for group in geometry.groups:
        tokens = longest
        if group.sliding_window:
            tokens = min(longest, group.sliding_window + configure.max_batch_tokens)
        pages += math.ceil(tokens / geometry.page_size) + 1
    one = configure.max_batch_tokens * (48 + 24 * len(geometry.groups))
    one += configure.max_requests_per_batch * (128 + 8 * pages + vocab // 8)
    one += 80 * most_logits(vocab, configure, loaded.device)
    edits = configure.max_requests_per_batch * min(longest, vocab)
    return one + 24 * min(edits, _MOST_EDITS)
