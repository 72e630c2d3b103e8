"""Validates a worker's Ready, and reads the KV memory that it describes.

The scheduler allocates tables of the sizes in a Ready, so an invalid one must be refused first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from protos import link_pb2
from protos.plan import NUM_RESERVED_CHUNKS
from scheduler_svc.core.limits import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    Geometry,
    GroupGeometry,
)

MAX_CHUNKS: Final = 1 << 24  # per pool: more of the smallest than any machine's memory holds
MAX_BLOCKS: Final = 1 << 26  # per cache group
MAX_LAYERS: Final = 10_000
MAX_TABLE_ENTRIES: Final = 1 << 29  # in the block tables of all rows: 2 GiB
MAX_VOCAB_SIZE: Final = 1 << 24


def geometry_of(ready: link_pb2.Ready) -> Geometry:
    """The KV memory of a Ready that `why_not_ready` has accepted."""
    return Geometry(
        page_size=ready.page_size,
        num_chunks=ready.num_chunks,
        chunk_bytes=ready.chunk_bytes,
        groups=tuple(
            GroupGeometry(
                group.kind, len(group.layers), group.blocks_per_chunk, group.sliding_window
            )
            for group in ready.groups
        ),
        max_model_len=ready.max_model_len,
        num_swap_chunks=ready.num_swap_chunks,
        overlaps_swap=ready.overlaps_swap,
        device=ready.device,
        max_logits=ready.max_logits,
    )


def why_not_ready(
    ready: link_pb2.Ready, configure: link_pb2.Configure, num_rows: int
) -> str | None:
    """The first fault found in a Ready that answers `configure`; None if there is none."""
    return next(_faults(ready, configure, num_rows), None)


def _faults(ready: link_pb2.Ready, configure: link_pb2.Configure, num_rows: int) -> Iterator[str]:
    for name, lowest, highest in (
        ("vocab_size", 1, MAX_VOCAB_SIZE),
        ("num_embeddings", 0, MAX_VOCAB_SIZE),  # 0 = vocab_size
        ("max_model_len", 1, (1 << 31) - 1),
        ("page_size", 1, (1 << 31) - 1),
        ("num_chunks", NUM_RESERVED_CHUNKS + 1, MAX_CHUNKS),
        ("num_swap_chunks", 0, MAX_CHUNKS),
        ("chunk_bytes", 1, 1 << 48),
        ("max_logits", 0, (1 << 31) - 1),  # 0 = all
    ):
        value = getattr(ready, name)
        if not lowest <= value <= highest:
            yield f"{name} is {value}; allowed: {lowest} to {highest}"
    if 0 < ready.max_logits < num_rows:
        yield (
            f"max_logits is {ready.max_logits}; allowed: 0, or at least {num_rows}, the requests "
            "that may sample in one step"
        )
    for name in ("page_size", "max_model_len"):
        wanted, value = getattr(configure, name), getattr(ready, name)
        if wanted and value != wanted:  # 0: the worker chooses
            yield f"{name} is {value}, but {wanted} was requested"
    if not ready.groups:
        yield "it has no cache group"
    layers = [layer for group in ready.groups for layer in group.layers]
    if len(layers) > MAX_LAYERS or len(ready.groups) > len(layers):
        yield f"{len(ready.groups)} cache groups share {len(layers)} layers"
    if len(set(layers)) < len(layers) or min(layers, default=0) < 0:
        yield f"layers must be distinct and not negative, but are {str(layers)[:200]}"
    for index, group in enumerate(ready.groups):
        for fault in _group_faults(ready, group):
            yield f"cache group {index}: {fault}"
    pages = -(-min(ready.max_model_len, geometry_of(ready).pool_tokens()) // ready.page_size)
    entries = num_rows * len(ready.groups) * pages
    if entries > MAX_TABLE_ENTRIES:
        yield (
            f"block tables of {num_rows} requests of {pages} pages in {len(ready.groups)} cache "
            f"groups have {entries} entries; allowed: at most {MAX_TABLE_ENTRIES}"
        )


def _group_faults(ready: link_pb2.Ready, group: link_pb2.CacheGroup) -> Iterator[str]:
    if not group.layers:
        yield "it has no layers"
    num_chunks = max(ready.num_chunks, ready.num_swap_chunks)
    if not 1 <= group.blocks_per_chunk <= MAX_BLOCKS // num_chunks:
        yield (
            f"blocks_per_chunk is {group.blocks_per_chunk}; allowed: 1 to "
            f"{MAX_BLOCKS // num_chunks}"
        )
    if group.kind not in (FULL_ATTENTION, SLIDING_ATTENTION):
        yield f"kind is {group.kind[:50]!r}; allowed: {FULL_ATTENTION}, {SLIDING_ATTENTION}"
    if (group.kind == SLIDING_ATTENTION) != (group.sliding_window > 0) or group.sliding_window < 0:
        yield f"sliding_window is {group.sliding_window} for {group.kind[:50]}"
