"""The shape of a model's KV cache: layers, cache groups, and the sizes of page, block and chunk.

Owns: which layers share a block table, and the arithmetic page -> block -> chunk. Pure: it reads a
transformers config's attributes and imports neither torch nor transformers. Does not own: the
memory itself (kv_pool.py), how many chunks fit (memory.py), which split of the layers into groups
suits a pool (tiling.py), what is refused for other reasons (model_check.py).

    page  = 2 * num_kv_heads * head_dim * itemsize * page_size   K, then V, of one layer
    block = page * layer slots of the group                      what a block table entry names
    chunk = a whole number of blocks of every group              the pool's unit
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

from protos.plan import NUM_RESERVED_CHUNKS, PADDING_READ_CHUNK, PADDING_WRITE_CHUNK
from worker.tiling import Tiling, choose_tiling

FULL_ATTENTION: Final = "full_attention"
SLIDING_ATTENTION: Final = "sliding_attention"
SERVED_KINDS: Final = (FULL_ATTENTION, SLIDING_ATTENTION)


class UnsupportedModel(ValueError):
    """This model cannot be served; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of one attention type, which share one block table."""

    kind: str  # FULL_ATTENTION or SLIDING_ATTENTION
    layers: tuple[int, ...]  # indices of the model's layers, in pool order
    sliding_window: int  # 0 for full attention; counts the current token
    blocks_per_chunk: int
    num_unused_slots: int = 0  # places for layers at the end of each block that no layer uses

    @property
    def num_slots(self) -> int:
        """Pages in a block: one for every layer, and those that lie idle."""
        return len(self.layers) + self.num_unused_slots

    @property
    def padding_read_block(self) -> int:
        """The block that padding reads: always zero."""
        return PADDING_READ_CHUNK * self.blocks_per_chunk

    @property
    def padding_write_block(self) -> int:
        """The block that takes the writes of padding."""
        return PADDING_WRITE_CHUNK * self.blocks_per_chunk

    @property
    def first_block(self) -> int:
        """The first block that a request may own."""
        return NUM_RESERVED_CHUNKS * self.blocks_per_chunk


@dataclass(frozen=True, slots=True)
class Geometry:
    """Everything about the KV cache that does not depend on how much memory there is."""

    groups: tuple[CacheGroup, ...]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # tokens
    itemsize: int  # bytes of one number of K or V

    @property
    def page_bytes(self) -> int:
        """K and V of one layer for page_size tokens."""
        return 2 * self.num_kv_heads * self.head_dim * self.itemsize * self.page_size

    def block_bytes(self, group: CacheGroup) -> int:
        return self.page_bytes * group.num_slots

    @property
    def chunk_bytes(self) -> int:
        group = self.groups[0]
        return self.block_bytes(group) * group.blocks_per_chunk

    @property
    def model_block_bytes(self) -> int:
        """page_size tokens of all layers: what `num_blocks` of the configuration counts."""
        return self.page_bytes * self.num_layers

    def chunks_for_tokens(self, num_tokens: int) -> int:
        """Chunks that one request of num_tokens tokens can fill at most, over all groups. Pages
        that leave a window count too: they may stay in the prefix cache."""
        pages = math.ceil(num_tokens / self.page_size)
        return sum(math.ceil(pages / group.blocks_per_chunk) for group in self.groups)

    def chunks_for_blocks(self, num_blocks: int) -> int:
        """Chunks that hold num_blocks whole-model blocks, the reserved ones not counted."""
        return max(1, math.ceil(num_blocks * self.model_block_bytes / self.chunk_bytes))

    def fitted(self, pool_bytes: int) -> Geometry:
        """The same layers in the groups that suit a pool of that size (tiling.py)."""
        layers = {
            (group.kind, group.sliding_window): [
                layer for other in self.groups if other.kind == group.kind for layer in other.layers
            ]
            for group in self.groups
        }
        full, sliding = (
            sum(len(found) for (kind, _), found in layers.items() if kind == wanted)
            for wanted in SERVED_KINDS
        )
        tiling = choose_tiling(full, sliding, self.page_bytes, pool_bytes)
        groups = [
            group
            for (kind, window), found in layers.items()
            for group in _split(kind, window, sorted(found), tiling)
        ]
        return replace(self, groups=tuple(groups))


def layer_kinds(text_config: Any) -> tuple[str, ...]:
    """The attention type of every layer: `layer_types` wins; else a window means all sliding;
    else all are full (the rule that transformers' own caches follow).

    Families with a switch use the window only where `use_sliding_window` is on, and from layer
    max_window_layers on if they have that too (transformers' Qwen2Config).
    """
    num_layers: int = text_config.num_hidden_layers
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types is not None:
        if len(layer_types) < num_layers:
            raise UnsupportedModel(
                f"{text_config.model_type}: layer_types names {len(layer_types)} layers, "
                f"num_hidden_layers is {num_layers}"
            )
        return tuple(layer_types[:num_layers])
    first_sliding = num_layers
    if getattr(text_config, "sliding_window", None):
        switch = getattr(text_config, "use_sliding_window", None)
        if switch is None:
            first_sliding = 0
        elif switch:
            first_sliding = getattr(text_config, "max_window_layers", None) or 0
    return tuple(
        SLIDING_ATTENTION if layer >= first_sliding else FULL_ATTENTION
        for layer in range(num_layers)
    )


def geometry_of(text_config: Any, page_size: int, itemsize: int) -> Geometry:
    """The geometry of a model, from its transformers text config, with one group per attention
    type, as a pool without bounds would have it; `fitted` gives the one for a real pool.

    Raises UnsupportedModel for layer types that are not served, ValueError for a page_size < 1.
    """
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; it must be at least 1")
    kinds = layer_kinds(text_config)
    for kind in dict.fromkeys(kinds):
        if kind not in SERVED_KINDS:
            raise UnsupportedModel(
                f"{text_config.model_type}: layer type {kind!r} is not served; allowed are "
                f"{' and '.join(SERVED_KINDS)}"
            )
    window = getattr(text_config, "sliding_window", None) or 0
    if SLIDING_ATTENTION in kinds and not (isinstance(window, int) and window > 0):
        raise UnsupportedModel(
            f"{text_config.model_type}: it has sliding layers, but sliding_window is {window!r}"
        )
    num_heads = text_config.num_attention_heads
    num_kv_heads = getattr(text_config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // num_heads
    for name, value in (("num_key_value_heads", num_kv_heads), ("head_dim", head_dim)):
        if not isinstance(value, int):
            raise UnsupportedModel(
                f"{text_config.model_type}: {name} is {value!r}; it must be one number for all "
                f"layers"
            )
    return Geometry(
        groups=_one_group_per_kind(kinds, window),
        num_layers=len(kinds),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        itemsize=itemsize,
    )


def _one_group_per_kind(kinds: tuple[str, ...], window: int) -> tuple[CacheGroup, ...]:
    layers = {
        kind: [layer for layer, of_layer in enumerate(kinds) if of_layer == kind]
        for kind in SERVED_KINDS
        if kind in kinds
    }
    tiling = Tiling(*(len(layers.get(kind, ())) for kind in SERVED_KINDS))
    return tuple(
        group
        for kind, found in layers.items()
        for group in _split(kind, window if kind == SLIDING_ATTENTION else 0, found, tiling)
    )


def _split(kind: str, window: int, layers: list[int], tiling: Tiling) -> list[CacheGroup]:
    """Groups of equally many slots; in the last one some may lie idle."""
    size = tiling.full_slots if kind == FULL_ATTENTION else tiling.sliding_slots
    return [
        CacheGroup(
            kind=kind,
            layers=tuple(layers[first : first + size]),
            sliding_window=window,
            blocks_per_chunk=tiling.slots_per_chunk // size,
            num_unused_slots=max(0, first + size - len(layers)),
        )
        for first in range(0, len(layers), size)
    ]
