"""What keeps a model from being served, found before it serves anyone.

Two looks: at the configuration, before weights are read, and at one small forward of the loaded
model, the probe. Some models never call the attention interface and would run "fine" without a KV
cache, with garbage as result: the probe counts one call per hidden layer, of the expected shapes.

Owns: reasons for refusal other than layer types (geometry.py) and `deterministic`
(deterministic.py). Every refusal is an UnsupportedModel that names the model and the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from worker.attention.interface import AttentionCall, answering, layer_index
from worker.geometry import Geometry, UnsupportedModel

_PROBE_TOKENS: Final = 3


def check_config(text_config: Any) -> None:
    """Refuse what the configuration alone rules out. Raises UnsupportedModel."""
    for reason in _reasons(text_config):
        raise UnsupportedModel(f"{text_config.model_type}: {reason}")


def _reasons(config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder; only decoders are served"
    if getattr(config, "use_bidirectional_attention", None) or not getattr(
        config, "is_causal", True
    ):
        yield "its attention is bidirectional; a KV cache needs causal attention"
    shared = getattr(config, "num_kv_shared_layers", None)
    if shared:
        yield f"num_kv_shared_layers is {shared}: layers that share their KV are not served yet"
    for name, of_all in (
        ("global_head_dim", getattr(config, "head_dim", None)),
        ("num_global_key_value_heads", getattr(config, "num_key_value_heads", None)),
    ):
        value = getattr(config, name, None)
        if value is not None and value != of_all:
            yield f"{name} is {value} beside {of_all}: layers must not differ in their heads"
    for rope_type in _rope_types(config):
        if "dynamic" in rope_type:  # longrope has the same flaw, but can be pinned: rope.py
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


class _Probe:
    """Answers attention calls with zeros and keeps their layers and shapes."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.shapes: list[tuple[tuple[int, ...], ...]] = []  # query, key, value of each call
        self.causal: list[bool] = []
        self.windows: list[int] = []

    def attend_layer(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
    ) -> torch.Tensor:
        self.layers.append(layer_index(module))
        self.shapes.append((tuple(query.shape), tuple(key.shape), tuple(value.shape)))
        self.causal.append(getattr(module, "is_causal", True) is not False)
        self.windows.append(call.sliding_window)
        _, num_heads, num_tokens, _ = query.shape
        return query.new_zeros(1, num_tokens, num_heads, value.shape[-1])


def probe(model: PreTrainedModel, geometry: Geometry, device: torch.device) -> int:
    """Run one small forward and see that attention is called as expected.

    Returns the number of logit columns. Raises UnsupportedModel.
    """
    name = str(model.config.model_type)
    if model.base_model is model:
        raise UnsupportedModel(f"{name}: it has no base model whose hidden states could be watched")
    seen = _Probe()
    tokens = torch.arange(_PROBE_TOKENS, device=device)[None]
    try:
        with torch.inference_mode(), answering(seen):
            logits = model(
                input_ids=tokens,
                position_ids=tokens,
                use_cache=False,
                logits_to_keep=torch.tensor([_PROBE_TOKENS - 1], device=device),
            ).logits
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"{name}: a forward with the attention of this worker fails: "
            f"{type(error).__name__}: {error}"
        ) from error
    _check_calls(name, seen, geometry)
    if logits.shape[:2] != (1, 1):
        raise UnsupportedModel(
            f"{name}: logits_to_keep is ignored; one row was asked for, the logits have the shape "
            f"{list(logits.shape)}"
        )
    return int(logits.shape[-1])


def _check_calls(name: str, seen: _Probe, geometry: Geometry) -> None:
    if sorted(seen.layers) != list(range(geometry.num_layers)):
        raise UnsupportedModel(
            f"{name}: it has {geometry.num_layers} hidden layers, but its attention was called "
            f"{len(seen.layers)} times through transformers' attention interface; every layer "
            f"must call it exactly once"
        )
    heads = (geometry.num_heads, geometry.num_kv_heads, geometry.num_kv_heads)
    expected = tuple((1, count, _PROBE_TOKENS, geometry.head_dim) for count in heads)
    for layer, shapes, causal in zip(seen.layers, seen.shapes, seen.causal, strict=True):
        if shapes != expected:
            raise UnsupportedModel(
                f"{name}: layer {layer} has query, key and value of the shapes "
                f"{[list(shape) for shape in shapes]}; its configuration promises "
                f"{[list(shape) for shape in expected]}, and all layers must be alike"
            )
        if not causal:
            raise UnsupportedModel(f"{name}: the attention of layer {layer} is not causal")
    _check_windows(name, seen, geometry)


def _check_windows(name: str, seen: _Probe, geometry: Geometry) -> None:
    """A layer that names a window must name its group's. One that names none may apply it through
    a mask that is never made here (phimoe, qwen2_moe): then the configuration is right."""
    expected = {layer: g.sliding_window for g in geometry.groups for layer in g.layers}
    for layer, window in zip(seen.layers, seen.windows, strict=True):
        if window not in (0, expected[layer]):
            raise UnsupportedModel(
                f"{name}: layer {layer} attends through a window of {window} tokens, but its "
                f"configuration promises {expected[layer] or 'full attention'}"
            )
