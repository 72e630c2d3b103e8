"""The shape of a model's KV cache: layers, cache groups, and the sizes of page, block and chunk.

Owns: which layers share a block table, and the arithmetic page -> block -> chunk. Pure: it imports
neither torch nor transformers. What a layer keeps is observed, not believed (probe.py); a
configuration is only asked which attention types it names. Does not own: the memory itself
(kv_pool.py), how many chunks fit (memory.py), which split of the layers into groups suits a pool
(tiling.py), what is refused for other reasons (model_check.py).

    page  = 2 * num_kv_heads * head_dim * itemsize * page_size   K, then V, of one layer
    block = page * layer slots of the group                      what a block table entry names
    chunk = a whole number of blocks of every group              the pool's unit
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from protos.link import FULL_ATTENTION, SLIDING_ATTENTION
from protos.plan import NUM_RESERVED_CHUNKS, PADDING_READ_CHUNK, PADDING_WRITE_CHUNK
from worker.kv.tiling import Tiling, choose_tiling

SERVED_KINDS: Final = (FULL_ATTENTION, SLIDING_ATTENTION)
_MOST_KINDS: Final = 2  # of layers in one model; tiling.py


class UnsupportedModel(ValueError):
    """This model cannot be served; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer attends with, and how far back."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int  # 0 for full attention; counts the current token

    @property
    def kind(self) -> str:
        return SLIDING_ATTENTION if self.sliding_window else FULL_ATTENTION


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of one attention type, which share one block table."""

    kind: str  # FULL_ATTENTION or SLIDING_ATTENTION
    layers: tuple[int, ...]  # indices of the model's layers, in pool order
    sliding_window: int  # 0 for full attention; counts the current token
    blocks_per_chunk: int
    num_unused_slots: int = 0  # places for layers at the end of each block that no layer uses
    # (KV heads, numbers of each) where groups differ in them; None: the geometry's
    kv_shape: tuple[int, int] | None = None

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
    num_layers: int  # that keep K and V of their own
    num_heads: int  # these three: of the layers with most of each
    num_kv_heads: int
    head_dim: int
    page_size: int  # tokens
    itemsize: int  # bytes of one number of K or V
    # layers that read the K and V of another one, and which
    shared_layers: Mapping[int, int] = field(default_factory=dict)

    def kv_shape(self, group: CacheGroup) -> tuple[int, int]:
        """KV heads of the group's layers, and numbers of each."""
        return group.kv_shape or (self.num_kv_heads, self.head_dim)

    def page_bytes(self, group: CacheGroup) -> int:
        """K and V of one of the group's layers for page_size tokens."""
        return 2 * math.prod(self.kv_shape(group)) * self.itemsize * self.page_size

    def block_bytes(self, group: CacheGroup) -> int:
        return self.page_bytes(group) * group.num_slots

    @property
    def chunk_bytes(self) -> int:
        group = self.groups[0]
        return self.block_bytes(group) * group.blocks_per_chunk

    @property
    def model_block_bytes(self) -> int:
        """page_size tokens of all layers: what `num_blocks` of the configuration counts."""
        return sum(self.page_bytes(group) * len(group.layers) for group in self.groups)

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
        kinds: dict[CacheGroup, list[int]] = {}
        for group in self.groups:
            kinds.setdefault(_kind_of(group), []).extend(group.layers)
        unit, units = self._units(list(kinds))
        first, second = _counts(kinds)
        return self._tiled(kinds, choose_tiling(first, second, unit, pool_bytes, units))

    def _units(self, kinds: Sequence[CacheGroup]) -> tuple[int, tuple[int, int]]:
        """The largest number of bytes that divides a page of every kind, and how often it does."""
        first, second = self.page_bytes(kinds[0]), self.page_bytes(kinds[-1])
        unit = math.gcd(first, second)
        return unit, (first // unit, second // unit)

    def _tiled(self, kinds: Mapping[CacheGroup, Sequence[int]], tiling: Tiling) -> Geometry:
        """The layers of each kind in groups of equally many slots; in the last one some may lie
        idle."""
        sizes = (tiling.full_slots, tiling.sliding_slots)
        groups = []
        for (kind, found), size, units in zip(kinds.items(), sizes, tiling.units, strict=False):
            layers = sorted(found)
            groups += [
                replace(
                    kind,
                    layers=tuple(layers[first : first + size]),
                    blocks_per_chunk=tiling.units_per_chunk // (size * units),
                    num_unused_slots=max(0, first + size - len(layers)),
                )
                for first in range(0, len(layers), size)
            ]
        return replace(self, groups=tuple(groups))


def _counts(kinds: Mapping[CacheGroup, Sequence[int]]) -> tuple[int, int]:
    """Layers of each of one or two kinds."""
    counts = [len(layers) for layers in kinds.values()]
    return counts[0], sum(counts[1:])


def _kind_of(group: CacheGroup) -> CacheGroup:
    """What all groups of layers of one kind have in common."""
    return replace(group, layers=(), blocks_per_chunk=0, num_unused_slots=0)


def layer_kinds(text_config: Any) -> tuple[str, ...]:
    """The attention type of every layer: `layer_types` wins; else a window means all sliding;
    else all are full (the rule that transformers' own caches follow).

    Families with a switch use the window only where `use_sliding_window` is on, and from layer
    max_window_layers on if they have that too (transformers' Qwen2Config).
    """
    num_layers: int = getattr(text_config, "num_hidden_layers", 0)
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


def check_layer_types(text_config: Any) -> None:
    """Refuse attention types that are not served, before weights are read. Raises
    UnsupportedModel."""
    for kind in dict.fromkeys(layer_kinds(text_config)):
        if kind not in SERVED_KINDS:
            raise UnsupportedModel(
                f"{text_config.model_type}: layer type {kind!r} is not served; allowed are "
                f"{' and '.join(SERVED_KINDS)}"
            )


def geometry_of(
    name: str,
    layers: Sequence[LayerShape],
    page_size: int,
    itemsize: int,
    shared_layers: Mapping[int, int] | None = None,
) -> Geometry:
    """The geometry of the model `name` from its layers, with one group per kind of layer, as a
    pool without bounds would have it; `fitted` gives the one for a real pool.

    Layers are of one kind where their window and their K and V are alike. Raises UnsupportedModel
    for more than two kinds, ValueError for a page_size < 1.
    """
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; it must be at least 1")
    shared = dict(shared_layers or {})
    differ = len({(layer.num_kv_heads, layer.head_dim) for layer in layers}) > 1
    kinds: dict[CacheGroup, list[int]] = {}
    for index, layer in enumerate(layers):
        if index not in shared:
            kv_shape = (layer.num_kv_heads, layer.head_dim) if differ else None
            kind = CacheGroup(layer.kind, (), layer.sliding_window, 0, kv_shape=kv_shape)
            kinds.setdefault(kind, []).append(index)
    if len(kinds) > _MOST_KINDS:
        found = "; ".join(_describe(layers[of_kind[0]]) for of_kind in kinds.values())
        raise UnsupportedModel(
            f"{name}: its layers are of {len(kinds)} kinds ({found}); the KV pool serves at most "
            f"{_MOST_KINDS}"
        )
    kinds = dict(sorted(kinds.items(), key=lambda entry: entry[0].sliding_window > 0))
    whole = Geometry(
        groups=(),
        num_layers=len(layers) - len(shared),
        num_heads=max(layer.num_heads for layer in layers),
        num_kv_heads=max(layer.num_kv_heads for layer in layers),
        head_dim=max(layer.head_dim for layer in layers),
        page_size=page_size,
        itemsize=itemsize,
        shared_layers=shared,
    )
    _, units = whole._units(list(kinds))
    return whole._tiled(kinds, Tiling(*_counts(kinds), units))


def _describe(layer: LayerShape) -> str:
    window = f"a window of {layer.sliding_window}" if layer.sliding_window else "full attention"
    return f"{window}, {layer.num_kv_heads} KV heads of {layer.head_dim}"
