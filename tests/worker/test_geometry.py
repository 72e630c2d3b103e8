"""Sizes of pages, blocks and chunks, layer types, and the groups that layers are split into."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhimoeConfig,
    Qwen2Config,
    SmolLM3Config,
)

from tests.support import tiny_models
from tests.support.promised_geometry import promised_geometry
from worker.kv.geometry import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    CacheGroup,
    LayerShape,
    UnsupportedModel,
    check_layer_types,
    geometry_of,
    layer_kinds,
)
from worker.kv.kv_pool import KvPool


def smollm2() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3
    )


def test_sizes_of_smollm2():
    """The numbers that memory planning and swap rest on: one block is 0.74 MB in float32."""
    geometry = promised_geometry(smollm2(), page_size=16, itemsize=4)
    assert geometry.head_dim == 64
    assert geometry.page_bytes(geometry.groups[0]) == 2 * 3 * 64 * 4 * 16
    assert (
        geometry.chunk_bytes
        == geometry.model_block_bytes
        == 30 * geometry.page_bytes(geometry.groups[0])
        == 737280
    )
    assert geometry.groups == (CacheGroup(FULL_ATTENTION, tuple(range(30)), 0, 1),)
    assert geometry.chunks_for_blocks(7) == 7
    assert geometry.chunks_for_tokens(17) == 2


def test_reserved_chunks_come_first():
    """Padding reads chunk 0 and writes chunk 1: no request may ever own them."""
    group = CacheGroup(SLIDING_ATTENTION, (0,), 8, blocks_per_chunk=3)
    assert (group.padding_read_block, group.padding_write_block, group.first_block) == (0, 3, 6)


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (LlamaConfig(num_hidden_layers=2), {FULL_ATTENTION}),
        (Qwen2Config(num_hidden_layers=2, use_sliding_window=False), {FULL_ATTENTION}),
        (MistralConfig(num_hidden_layers=2), {SLIDING_ATTENTION}),
        (Gemma3TextConfig(num_hidden_layers=6), {FULL_ATTENTION, SLIDING_ATTENTION}),
        (PhimoeConfig(num_hidden_layers=2), {FULL_ATTENTION}),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_layer_kinds_follow_transformers(config, kinds):
    """layer_types wins, else a window means all sliding: else a windowed model would be served
    with full attention, and answer wrongly past its window."""
    assert set(layer_kinds(config)) == kinds


def test_windows_that_are_switched_on_from_some_layer():
    """Families that have a switch beside the window: transformers reads all three."""
    config = LlamaConfig(num_hidden_layers=3)
    config.sliding_window, config.use_sliding_window, config.max_window_layers = 8, False, 2
    assert layer_kinds(config) == (FULL_ATTENTION,) * 3
    config.use_sliding_window = True
    assert layer_kinds(config) == (FULL_ATTENTION, FULL_ATTENTION, SLIDING_ATTENTION)
    config.max_window_layers = None
    assert layer_kinds(config) == (SLIDING_ATTENTION,) * 3
    sliding = SmolLM3Config(num_hidden_layers=4, use_sliding_window=True, sliding_window=8)
    assert layer_kinds(sliding) == (*(FULL_ATTENTION,) * 3, SLIDING_ATTENTION)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            Qwen2Config(num_hidden_layers=1, layer_types=["linear_attention"]),
            r"qwen2: layer type 'linear_attention' is not served; allowed are full_attention",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_other_layer_types_are_refused_by_name(config, message):
    """A person must learn which model, what about it, and what is allowed."""
    with pytest.raises(UnsupportedModel, match=message):
        check_layer_types(config)


def gemma3_27b() -> Gemma3TextConfig:
    return Gemma3TextConfig(
        num_hidden_layers=62,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        hidden_size=5376,
        sliding_window=1024,
    )


def gemma3_4b() -> Gemma3TextConfig:
    return Gemma3TextConfig(
        num_hidden_layers=34,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        hidden_size=2560,
        sliding_window=1024,
    )


def gpt_oss_20b() -> GptOssConfig:
    return GptOssConfig(num_hidden_layers=24, num_local_experts=32)


GIB = 2**30


@pytest.mark.parametrize("pool_gib", [4, 8, 20, 80, 120])
@pytest.mark.parametrize("make", [gemma3_27b, gemma3_4b, gpt_oss_20b])
def test_hybrid_models_share_well(make, pool_gib):
    """One group per type gives Gemma-3-27B chunks of 32.5 MiB at page_size 16 and of 520 MiB at
    256: few chunks, of which a request's last ones are mostly empty. Nor may the cure waste: what
    reserved chunks, idle slots and the pool's rest take together stays under 3 %."""
    one_each = promised_geometry(make(), page_size=16, itemsize=2)
    pool = pool_gib * GIB
    geometry = one_each.fitted(pool)
    assert geometry.chunk_bytes <= 16 * 2**20
    assert geometry.chunk_bytes <= pool / 500
    num_chunks = pool // geometry.chunk_bytes
    wasted = pool - (num_chunks - 2) * geometry.chunk_bytes
    idle = 0.0
    for kind in (FULL_ATTENTION, SLIDING_ATTENTION):
        groups = [group for group in geometry.groups if group.kind == kind]
        assert len({group.num_slots for group in groups}) == 1
        idle += sum(group.num_unused_slots for group in groups)
    idle /= sum(group.num_slots for group in geometry.groups)
    print(
        f"{one_each.num_layers} layers, pool {pool_gib} GiB: {len(geometry.groups)} groups, chunk "
        f"{geometry.chunk_bytes / 2**20:.2f} MiB, {wasted / pool + idle:.2%} wasted"
    )
    assert wasted / pool + idle < 0.03


def gemma4_26b() -> list[LayerShape]:
    """Five sliding layers to a full one, which has fewer and wider heads."""
    sliding, full = LayerShape(16, 8, 256, 1024), LayerShape(16, 2, 512, 0)
    return [full if layer % 6 == 5 else sliding for layer in range(30)]


def gemma4_e2b() -> list[LayerShape]:
    """Full layers of twice the head size."""
    sliding, full = LayerShape(8, 1, 256, 512), LayerShape(8, 1, 512, 0)
    return [full if layer % 5 == 4 else sliding for layer in range(15)]


@pytest.mark.parametrize("pool_gib", [4, 20, 120])
@pytest.mark.parametrize("layers", [gemma4_26b(), gemma4_e2b()], ids=["26b", "e2b"])
def test_layers_of_two_shapes_share_a_pool(layers, pool_gib):
    """Pages of two sizes must tile one chunk to the last byte, or blocks would overlap; and chunks
    must stay as small as those of other hybrid models."""
    geometry = geometry_of("gemma4", layers, 16, 2).fitted(pool_gib * GIB)
    assert geometry.chunk_bytes <= 16 * 2**20
    assert geometry.model_block_bytes == sum(
        2 * shape.num_kv_heads * shape.head_dim * 2 * 16 for shape in layers
    )
    found = {}
    for group in geometry.groups:
        assert geometry.block_bytes(group) * group.blocks_per_chunk == geometry.chunk_bytes
        for layer in group.layers:
            found[layer] = (*geometry.kv_shape(group), group.sliding_window)
    assert found == {
        index: (shape.num_kv_heads, shape.head_dim, shape.sliding_window)
        for index, shape in enumerate(layers)
    }


def test_more_kinds_of_layers_than_two_are_refused():
    """A person learns which kinds there are."""
    layers = [LayerShape(4, 2, 8, window) for window in (0, 5, 9)]
    with pytest.raises(UnsupportedModel, match=r"odd: .* of 3 kinds \(full attention, 2 KV heads"):
        geometry_of("odd", layers, 16, 4)


def test_shared_layers_take_no_memory():
    """They read the pages of the layer whose keys they attend with."""
    layers = [LayerShape(4, 2, 8, 0)] * 3
    geometry = geometry_of("sharing", layers, 16, 4, {2: 1})
    assert geometry.groups[0].layers == (0, 1)
    assert geometry.num_layers == 2
    pool = KvPool(geometry, 3, torch.float32, torch.device("cpu"))
    assert pool.layer_views(2)[1].data_ptr() == pool.layer_views(1)[1].data_ptr()


@pytest.mark.parametrize("pool", [1, 10**6, 10**9, 10**12])
@pytest.mark.parametrize("make", [gemma3_27b, gemma3_4b, gpt_oss_20b, tiny_models.gemma3])
def test_groups_are_a_partition_that_tiles_chunks(make, pool):
    """Every layer has one place; every group's blocks fill a chunk to the last byte; a group is of
    one type, so one table serves it."""
    geometry = promised_geometry(make(), 16, 2).fitted(pool)
    layers = sorted(layer for group in geometry.groups for layer in group.layers)
    assert layers == list(range(geometry.num_layers))
    kinds = layer_kinds(make())
    for group in geometry.groups:
        assert geometry.block_bytes(group) * group.blocks_per_chunk == geometry.chunk_bytes
        assert {kinds[layer] for layer in group.layers} == {group.kind}
        assert (group.sliding_window > 0) == (group.kind == SLIDING_ATTENTION)
    assert len(geometry.groups) <= 16


def test_one_type_of_layers_is_one_group():
    """Splitting it would cost a table and save nothing, whatever the pool."""
    for config in (smollm2(), MistralConfig(), Phi3Config(sliding_window=2047)):
        geometry = promised_geometry(config, 16, 2).fitted(1)
        (group,) = geometry.groups
        assert group.blocks_per_chunk == 1
        assert group.num_unused_slots == 0
        assert geometry.chunk_bytes == geometry.model_block_bytes


def test_bad_page_size():
    """The message names value and limit."""
    with pytest.raises(ValueError, match="page_size is 0; it must be at least 1"):
        promised_geometry(smollm2(), 0, 4)
