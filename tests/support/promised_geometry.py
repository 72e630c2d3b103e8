"""The geometry that a configuration promises, for tests that have no model to look at."""

from __future__ import annotations

from transformers import PreTrainedConfig

from worker.kv.geometry import (
    SLIDING_ATTENTION,
    CacheGeometry,
    LayerShape,
    geometry_of,
    layer_kinds,
)


def promised_geometry(config: PreTrainedConfig, page_size: int, itemsize: int) -> CacheGeometry:
    """For models whose layers differ in their windows only."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers = [
        LayerShape(
            heads, kv_heads, head_dim, config.sliding_window if kind == SLIDING_ATTENTION else 0
        )
        for kind in layer_kinds(config)
    ]
    return geometry_of(config.model_type, layers, page_size, itemsize)
