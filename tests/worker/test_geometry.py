"""Sizes of pages, blocks and chunks, and the layer types that are refused."""

from __future__ import annotations

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, PhimoeConfig, Qwen2Config

from worker.geometry import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    CacheGroup,
    UnsupportedModel,
    _tile,
    geometry_of,
    layer_kinds,
)


def smollm2() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3
    )


def test_sizes_of_smollm2():
    """The numbers that memory planning and swap rest on: one block is 0.74 MB in float32."""
    geometry = geometry_of(smollm2(), page_size=16, itemsize=4)
    assert geometry.head_dim == 64
    assert geometry.page_bytes == 2 * 3 * 64 * 4 * 16
    assert geometry.chunk_bytes == geometry.model_block_bytes == 30 * geometry.page_bytes == 737280
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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MistralConfig(), r"mistral: .*sliding_window is 4096.* come later"),
        (Gemma3TextConfig(), r"gemma3_text: .*sliding windows come later"),
        (
            Qwen2Config(num_hidden_layers=1, layer_types=["linear_attention"]),
            r"qwen2: layer type 'linear_attention' is not served; allowed is full_attention",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_other_layer_types_are_refused_by_name(config, message):
    """A person must learn which model, what about it, and what is allowed."""
    with pytest.raises(UnsupportedModel, match=message):
        geometry_of(config, 16, 4)


def test_groups_tile_a_chunk():
    """The room for sliding windows: blocks of both kinds fill a chunk of the same bytes."""
    kinds = [SLIDING_ATTENTION, SLIDING_ATTENTION, FULL_ATTENTION] * 2
    full, sliding = _tile(kinds, sliding_window=8)
    assert (full.layers, full.sliding_window, full.blocks_per_chunk) == ((2, 5), 0, 2)
    assert (sliding.layers, sliding.sliding_window, sliding.blocks_per_chunk) == (
        (0, 1, 3, 4),
        8,
        1,
    )


def test_bad_page_size():
    """The message names value and limit."""
    with pytest.raises(ValueError, match="page_size is 0; it must be at least 1"):
        geometry_of(smollm2(), 0, 4)
