"""Replaces the forward of decoder layers by a fused one, where both compute the same.

Candidates are layers in float32 on the CPU with the parts of the llama line: packed linear layers,
RMS norms before or after attention and MLP (or both), norms of queries and keys, rotary embedding
in halves, a gated MLP. Names and shapes only suggest what a layer computes: each fused layer is
then run beside the original, and used only if queries, keys, values and output agree. The tokens of
this proof are at positions where a model may change its computation: the first ones, around windows
and lengths that the configuration names, the last ones, and one alone. A layer that receives
arguments which the fused one does not support is left alone. So an unforeseen scale or order of
operations costs speed, not answers. All other layers stay as they are.

If all layers of a model are fused, and each receives the tensor that the one before it returned,
they form a DecoderStack, which computes all of them in the last one.

The plain twin is the model's own forward, by weight_format "unpacked".

Owns: recognition, proof, the log of both. Does not own: the fused layer (decoder_layer.py), the
stack (decoder_stack.py), packing (packing.py).
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from worker.attention.interface import AttentionCall, StandIn, answering
from worker.cpu_layers.decoder_layer import (
    GELU_TANH,
    SILU,
    FusedLayer,
    LayerParts,
    Norm,
    Workspace,
    unknown_arguments,
)
from worker.cpu_layers.decoder_stack import DecoderStack
from worker.cpu_layers.packed_linear import PackedLinear
from worker.kv.geometry import CacheGeometry

_FIRST_POSITIONS: Final = 5
# Names of numbers in a configuration that may be lengths at which a computation changes.
_LENGTHS: Final = re.compile(r"position|window|length|_len$|chunk|floor")
_MOST_LENGTHS: Final = 8
# Relative to the largest value: sums in another order differ by less than this; where activations
# are quantised, one of them may be rounded to the other side.
_TOLERANCE: Final = 2e-4
_TOLERANCE_INT8: Final = 2e-3
_ACTIVATIONS: Final = {
    "SiLUActivation": SILU,
    "SiLU": SILU,
    "GELUTanh": GELU_TANH,
    "PytorchGELUTanh": GELU_TANH,
    "NewGELUActivation": GELU_TANH,
}
# (children of a layer beside attention and MLP) -> which norm is which
_NORMS: Final = {
    frozenset({"input_layernorm", "post_attention_layernorm"}): {
        "input": "input_layernorm",
        "before_mlp": "post_attention_layernorm",
    },
    frozenset({"post_attention_layernorm", "post_feedforward_layernorm"}): {
        "after_attention": "post_attention_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    },
    frozenset(
        {
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        }
    ): {
        "input": "input_layernorm",
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    },
}

logger = logging.getLogger(__name__)


class _Unlike(ValueError):
    """Why a layer cannot be fused."""


def fuse_model(model: PreTrainedModel, geometry: CacheGeometry, max_model_len: int) -> int:
    """Fuses layers in place, and logs which. Returns the number of fused layers.

    The layers are proved for positions up to max_model_len - 1.
    """
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return 0
    if not any(isinstance(module, PackedLinear) for module in layers.modules()):
        return 0  # an unpacked model is to stay as it is
    every = tried_positions(model.config.get_text_config().to_dict(), max_model_len)
    recorded = [_record(model, layers, positions) for positions in (every, every[-1:])]
    workspace = Workspace()
    fused: list[FusedLayer] = []
    reasons: Counter[str] = Counter()
    for layer in layers:
        try:
            parts = _parts(layer, geometry)
            one = FusedLayer(parts, _call_of(layer, recorded), workspace)
            for run in recorded:
                _prove(one, layer, run)
        except _Unlike as reason:
            reasons[str(reason)] += 1
        else:
            layer.forward = one
            fused.append(one)
    name = type(layers[0]).__name__
    is_stack = len(fused) == len(layers) and all(
        _follow_each_other(layers, run) for run in recorded
    )
    if is_stack:
        DecoderStack(fused, workspace)
    logger.info(
        "fused %d of %d layers (%s)%s",
        len(fused),
        len(layers),
        name,
        " into a single call" * is_stack,
    )
    for why, count in reasons.items():
        logger.info("%d layers (%s) stay as they are: %s", count, name, why)
    return len(fused)


# ---- recognition ----


def _parts(layer: nn.Module, geometry: CacheGeometry) -> LayerParts:
    children = {
        name: child for name, child in layer.named_children() if not isinstance(child, nn.Dropout)
    }
    attention, mlp = children.pop("self_attn", None), children.pop("mlp", None)
    if attention is None or mlp is None or frozenset(children) not in _NORMS:
        raise _Unlike(f"its parts are {', '.join(dict(layer.named_children()))}")
    norms = {place: _norm(children[name]) for place, name in _NORMS[frozenset(children)].items()}
    inside = dict(attention.named_children())
    qkv = _linears(inside, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    (o,) = _linears(inside, ("o_proj",))
    q_norm, k_norm = (inside.pop(name, None) for name in ("q_norm", "k_norm"))
    in_mlp = dict(mlp.named_children())
    gate_up = _linears(in_mlp, ("gate_proj", "up_proj"), "gate_up_proj")
    (down,) = _linears(in_mlp, ("down_proj",))
    activation = type(in_mlp.pop("act_fn", in_mlp.pop("activation_fn", None))).__name__
    if inside or in_mlp:
        raise _Unlike(f"it has unknown parts: {', '.join((*inside, *in_mlp))}")
    if activation not in _ACTIVATIONS:
        raise _Unlike(f"its activation is {activation}")
    heads = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
    width = sum(linear.out_features for linear in qkv)
    if width != (heads[0] + 2 * heads[1]) * heads[2] or o.in_features != heads[0] * heads[2]:
        raise _Unlike("the widths of its projections and heads differ")
    if sum(linear.out_features for linear in gate_up) != 2 * down.in_features:
        raise _Unlike("the widths of its gate and its MLP differ")
    parts = LayerParts(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        qkv=qkv,
        o=o,
        gate_up=gate_up,
        down=down,
        activation=_ACTIVATIONS[activation],
        rotates=bool(getattr(attention, "use_rope", True)),
        q=None if q_norm is None else _norm(q_norm),
        k=None if k_norm is None else _norm(k_norm),
        input=norms.get("input"),
        after_attention=norms.get("after_attention"),
        before_mlp=norms.get("before_mlp"),
        after_mlp=norms.get("after_mlp"),
    )
    for norm, count in ((parts.q, heads[0]), (parts.k, heads[1])):
        if norm is not None and len(norm.weight) not in (heads[2], count * heads[2]):
            raise _Unlike("the width of its norm of queries or keys is neither one head nor all")
    return parts


def _linears(
    children: dict[str, nn.Module], names: tuple[str, ...], in_one: str = ""
) -> tuple[PackedLinear, ...]:
    """Removes from `children` the layers of `names`, or the one that combines them."""
    found = [children.pop(name, None) for name in ((in_one,) if in_one in children else names)]
    linears = tuple(linear for linear in found if isinstance(linear, PackedLinear))
    if len(linears) < len(found):
        raise _Unlike(f"{' or '.join(names)} is missing or not packed")
    return linears


def _norm(module: nn.Module) -> Norm:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or weight is None or not isinstance(eps, float):
        raise _Unlike(f"a norm is a {type(module).__name__}")
    weight = weight.detach()
    if type(module).__name__.startswith("Gemma"):  # its weights are offsets from 1
        weight = weight + 1
    if weight.dtype != torch.float32 or not weight.is_contiguous():
        raise _Unlike(f"a norm's weight is {weight.dtype}")
    return Norm(weight, eps)


# ---- proof ----


class _Recorder(StandIn):
    """Records the inputs, attention calls and outputs of layers."""

    def __init__(self) -> None:
        self.calls: dict[int, AttentionCall] = {}
        self.asked: dict[int, tuple[torch.Tensor, ...]] = {}
        self.inputs: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.outputs: dict[int, Any] = {}  # of layers

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        self.calls[call.layer] = call
        self.asked[call.layer] = tuple(tensor.clone() for tensor in (query, key, value))
        return super().attend(query, key, value, call)


def tried_positions(config: Mapping[str, Any], max_model_len: int) -> list[int]:
    """Ascending positions below max_model_len at which a layer's computation may change: the first
    and last ones, the middle, and both sides of each length that `config` names."""
    lengths = sorted(set(_lengths(config)))[:_MOST_LENGTHS]
    wanted = {
        *range(_FIRST_POSITIONS),
        *(length + by for length in lengths for by in (-1, 0, 1)),
        max_model_len // 2,
        max_model_len - 2,
        max_model_len - 1,
    }
    return sorted(position for position in wanted if 0 <= position < max_model_len)


def _lengths(config: Mapping[str, Any]) -> Iterator[int]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _lengths(value)
        elif isinstance(value, int | float) and value > 1 and _LENGTHS.search(str(name)):
            yield int(value)


def _record(model: PreTrainedModel, layers: nn.ModuleList, positions: list[int]) -> _Recorder:
    """Records a forward over one token at each position, as a step runs it."""
    seen = _Recorder()
    hooks = [hook for layer in layers for hook in _hooks(layer, seen)]
    vocabulary = model.config.get_text_config().vocab_size
    try:
        with torch.inference_mode(), answering(seen):
            model(
                input_ids=torch.arange(len(positions))[None] % vocabulary,
                position_ids=torch.tensor(positions)[None],
                use_cache=False,
                logits_to_keep=torch.tensor([len(positions) - 1]),
            )
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _hooks(layer: nn.Module, seen: _Recorder) -> Iterator[Any]:
    key = id(layer)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.inputs[key] = (args, kwargs)

    def after(_: nn.Module, _args: Any, output: Any) -> None:
        seen.outputs[key] = output

    yield layer.register_forward_pre_hook(before, with_kwargs=True)
    yield layer.register_forward_hook(after)


def _prove(fused: FusedLayer, layer: nn.Module, recorded: _Recorder) -> None:
    """Runs `fused` on the layer's recorded input and compares. Raises _Unlike."""
    index, expected = fused.call.layer, recorded.outputs.get(id(layer))
    if not isinstance(expected, torch.Tensor):
        raise _Unlike("it returns more than hidden states")
    args, kwargs = recorded.inputs[id(layer)]
    unknown = unknown_arguments(kwargs)
    if unknown or len(args) > 1:
        raise _Unlike(f"it receives {', '.join(unknown) or 'more than hidden states'}")
    again = _Recorder()
    with torch.inference_mode(), answering(again):
        found = fused(*args, **kwargs)
    is_int8 = fused.parts.o.weight_format == "int8"
    tolerance = _TOLERANCE_INT8 if is_int8 else _TOLERANCE
    pairs = zip((*recorded.asked[index], expected), (*again.asked[index], found), strict=True)
    for name, (wanted, got) in zip(("query", "key", "value", "output"), pairs, strict=True):
        limit = tolerance * wanted.abs().max()
        if wanted.shape != got.shape or not (wanted - got).abs().max() <= limit:
            raise _Unlike(f"its {name} would differ")


def _call_of(layer: nn.Module, recorded: list[_Recorder]) -> AttentionCall:
    """The layer's attention call, which must not depend on the tokens. Raises _Unlike."""
    calls = [
        call for run in recorded for call in run.calls.values() if call.module is layer.self_attn
    ]
    if len(calls) != len(recorded):
        raise _Unlike("its self_attn does not call the attention interface")
    first, *others = calls
    for other in others:
        if (
            replace(other, sinks=None) != replace(first, sinks=None)
            or other.sinks is not first.sinks
        ):
            raise _Unlike("its attention call depends on the tokens")
    return first


def _follow_each_other(layers: nn.ModuleList, recorded: _Recorder) -> bool:
    """Whether each layer received what the one before it returned: the same object."""
    inputs = [recorded.inputs[id(layer)][0] for layer in layers]
    outputs = [recorded.outputs[id(layer)] for layer in layers]
    return all(
        len(args) == 1 and args[0] is output
        for args, output in zip(inputs[1:], outputs[:-1], strict=True)
    )
