"""The shape of a model's KV cache: layers, cache groups, and the sizes of page, block and chunk.

Owns: which layers share a block table, and the arithmetic page -> block -> chunk. Pure: it imports
neither torch nor transformers. What a layer stores is observed (probe.py), not taken from the
configuration, which only names the attention types. Does not own: the memory itself (kv_pool.py),
how many chunks fit (pool_size.py), which split of the layers into groups suits a pool (tiling.py),
refusals for other reasons (model_check.py).

    page  = 2 * num_kv_heads * head_dim * itemsize * page_size   K, then V, of one layer
    block = page * layer slots of the group                      what a block table entry names
    chunk = a whole number of blocks of every group              the pool's unit

The scheduler knows less of it, by Ready: scheduler_svc/core/limits.py.
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
    """The heads of one layer's attention, and its window."""

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
    num_unused_slots: int = 0  # layer slots at the end of each block that no layer uses
    # (KV heads, head_dim) where groups differ in them; None: those of the geometry
    kv_shape: tuple[int, int] | None = None

    @property
    def num_slots(self) -> int:
        """Pages in a block: one for every layer, and the unused ones."""
        return len(self.layers) + self.num_unused_slots

    @property
    def padding_read_block(self) -> int:
        """The block that padding reads: always zero."""
        return PADDING_READ_CHUNK * self.blocks_per_chunk

    @property
    def padding_write_block(self) -> int:
        """The block that padding writes."""
        return PADDING_WRITE_CHUNK * self.blocks_per_chunk

    @property
    def first_block(self) -> int:
        """The first block that a request may own."""
        return NUM_RESERVED_CHUNKS * self.blocks_per_chunk


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Everything about a model's KV cache except how many chunks it has."""

    groups: tuple[CacheGroup, ...]
    num_layers: int  # with K and V of their own
    num_heads: int  # these three: maxima over the layers
    num_kv_heads: int
    head_dim: int
    page_size: int  # tokens
    itemsize: int  # bytes of one number of K or V
    # layers that read the K and V of another layer -> that layer
    shared_layers: Mapping[int, int] = field(default_factory=dict)

    def kv_shape(self, group: CacheGroup) -> tuple[int, int]:
        """(KV heads, head_dim) of the group's layers."""
        return group.kv_shape or (self.num_kv_heads, self.head_dim)

    def page_bytes(self, group: CacheGroup) -> int:
        """Bytes of K and V of one of the group's layers, for page_size tokens."""
        return 2 * math.prod(self.kv_shape(group)) * self.itemsize * self.page_size

    def block_bytes(self, group: CacheGroup) -> int:
        return self.page_bytes(group) * group.num_slots

    @property
    def chunk_bytes(self) -> int:
        group = self.groups[0]
        return self.block_bytes(group) * group.blocks_per_chunk

    @property
    def model_block_bytes(self) -> int:
        """Bytes of page_size tokens of all layers, the unit of the setting `num_blocks`."""
        return sum(self.page_bytes(group) * len(group.layers) for group in self.groups)

    def chunks_for_tokens(self, num_tokens: int) -> int:
        """The most chunks that one request of num_tokens tokens can fill, over all groups. Pages
        that leave a window count too: they may stay in the prefix cache."""
        pages = math.ceil(num_tokens / self.page_size)
        return sum(math.ceil(pages / group.blocks_per_chunk) for group in self.groups)

    def chunks_for_blocks(self, num_blocks: int) -> int:
        """Chunks that hold num_blocks whole-model blocks, without the reserved ones."""
        return max(1, math.ceil(num_blocks * self.model_block_bytes / self.chunk_bytes))

    def fitted(self, pool_bytes: int) -> CacheGeometry:
        """The same layers in the groups that suit a pool of this size (tiling.py)."""
        kinds: dict[CacheGroup, list[int]] = {}
        for group in self.groups:
            kinds.setdefault(_kind_of(group), []).extend(group.layers)
        unit, units = self._units(list(kinds))
        first, second = _counts(kinds)
        return self._tiled(kinds, choose_tiling(first, second, unit, pool_bytes, units))

    def _units(self, kinds: Sequence[CacheGroup]) -> tuple[int, tuple[int, int]]:
        """The greatest common divisor of the kinds' page bytes, and each page in units of it."""
        first, second = self.page_bytes(kinds[0]), self.page_bytes(kinds[-1])
        unit = math.gcd(first, second)
        return unit, (first // unit, second // unit)

    def _tiled(self, kinds: Mapping[CacheGroup, Sequence[int]], tiling: Tiling) -> CacheGeometry:
        """The layers of each kind in groups with the same number of slots; the last group of a
        kind may have unused ones."""
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
    """The number of layers of each of two kinds; 0 for a second kind that does not exist."""
    counts = [len(layers) for layers in kinds.values()]
    return counts[0], sum(counts[1:])


def _kind_of(group: CacheGroup) -> CacheGroup:
    """What all groups of one kind of layers have in common."""
    return replace(group, layers=(), blocks_per_chunk=0, num_unused_slots=0)


def layer_kinds(text_config: Any) -> tuple[str, ...]:
    """The attention type of every layer: `layer_types` takes precedence; else a window means that
    all are sliding; else all are full (the rule of transformers' own caches).

    Families with the switch `use_sliding_window` use the window only if it is on, and from layer
    max_window_layers on if they have that as well (transformers' Qwen2Config).
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
    """Refuses attention types that are not served, before weights are read. Raises
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
) -> CacheGeometry:
    """The geometry of the model `name`, with one cache group per kind of layer, as for a pool of
    unlimited size; `fitted` adapts it to a real one.

    Layers are of one kind if they have the same window and the same shape of K and V. Raises
    UnsupportedModel for more than two kinds, ValueError for a page_size < 1.
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
            f"{name}: its layers are of {len(kinds)} kinds ({found}); the KV pool supports at most "
            f"{_MOST_KINDS}"
        )
    kinds = dict(sorted(kinds.items(), key=lambda entry: entry[0].sliding_window > 0))
    whole = CacheGeometry(
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
