"""Refuses models by their configuration, before weights are read.

Owns: all such reasons except layer types (geometry.py), `deterministic` (deterministic.py) and
those that only a forward shows (probe.py). Every refusal is an UnsupportedModel that names the
model and the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from worker.kv.geometry import UnsupportedModel


def check_config(text_config: Any) -> None:
    """Raises UnsupportedModel for what the configuration alone rules out."""
    for reason in _reasons(text_config):
        raise UnsupportedModel(f"{text_config.model_type}: {reason}")


def _reasons(config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder; only decoders are served"
    # Gemma 4's "vision" concerns image tokens, which are never passed here
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        yield (
            f"use_bidirectional_attention is {config.use_bidirectional_attention!r}; a KV cache "
            f"needs causal attention"
        )
    if getattr(config, "is_causal", True) is False:
        yield "is_causal is False; a KV cache needs causal attention"
    for rope_type in _rope_types(config):
        if "dynamic" in rope_type:  # longrope has the same problem, but can be pinned: rope.py
            yield (
                f"its RoPE is {rope_type!r}: its frequencies follow the longest request of a "
                f"batch, so one long request would change the answers of its neighbours; set "
                f"another rope_type (yarn, linear) in the model's config.json"
            )


def _rope_types(config: Any) -> Iterator[str]:
    """The RoPE kinds of all layer types; `rope_parameters` is nested where they differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for entry in (parameters, *parameters.values()):
        if isinstance(entry, Mapping):
            rope_type = entry.get("rope_type", entry.get("type"))
            if isinstance(rope_type, str):
                yield rope_type
