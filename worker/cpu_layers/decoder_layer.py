"""A decoder layer in two calls to C, around its attention.

Owns: what a layer consists of (LayerParts), passing it to C, the memory for intermediate values
that layers share. Does not own: arithmetic (kernels/decoder.c), finding the parts in a model and
proving that the result is the same (fusing.py), attention (attention/), all layers in one call
(decoder_stack.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from worker.attention.interface import AttentionCall, attend, refuse_mask
from worker.cpu_layers.packed_linear import PackedLinear
from worker.kernels.build import kernel_library

SILU, GELU_TANH = 0, 1  # of decoder.h
# Arguments of layers that FusedLayer ignores: the embeddings already contain the positions, which
# fusing.py proves, and the rest is about caches, which a step does not have.
_HARMLESS: Final = frozenset(
    {
        "hidden_states",
        "attention_mask",
        "position_embeddings",
        "position_ids",
        "cache_position",
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """x / sqrt(mean(x^2) + eps) * weight"""

    weight: torch.Tensor  # float32 [width]
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """The parts of a decoder layer, float32 on the CPU, which computes in this order:

    norm input; q, k, v; norms q, k; rotary embedding; attention; o; norm after_attention; residual;
    norm before_mlp; gate, up; down; norm after_mlp; residual. Norms may be missing. One linear
    layer may compute q, k and v, and one gate and up.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: tuple[PackedLinear, ...]
    o: PackedLinear
    gate_up: tuple[PackedLinear, ...]
    down: PackedLinear
    activation: int
    rotates: bool  # its queries and keys, by the embeddings that the model passes to it
    input: Norm | None
    q: Norm | None
    k: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None


Embeddings = tuple[torch.Tensor, torch.Tensor]  # cos and sin [1, T, dim]


class Workspace:
    """Memory for a layer's intermediate values, which all layers of a model share."""

    def __init__(self) -> None:
        self._rows = 0
        self._parts: list[LayerParts] = []
        self._embeddings: Embeddings | None = None
        self._rotary = c_rotary(None)
        self.c_struct = _Workspace()

    def serve(self, parts: LayerParts) -> None:
        """Registers a layer, for which the memory must suffice, too."""
        self._parts.append(parts)
        self._rows = 0

    def reserve(self, rows: int) -> None:
        """Grows to `rows` rows if it is smaller."""
        if rows <= self._rows:
            return
        linears = [x for p in self._parts for x in (*p.qkv, p.o, *p.gate_up, p.down)]
        hidden = max(parts.o.out_features for parts in self._parts)
        self.normed = torch.empty(rows, hidden)
        self.summand = torch.empty(rows, hidden)
        self.qkv = torch.empty(rows * max(_width(parts.qkv) for parts in self._parts))
        self.attended = torch.empty(rows, max(parts.o.in_features for parts in self._parts))
        self.gate_up = torch.empty(rows * max(_width(parts.gate_up) for parts in self._parts))
        self.scratch = torch.empty(max(x.scratch_bytes(rows) for x in linears), dtype=torch.uint8)
        for name in _MEMORIES:
            setattr(self.c_struct, name, getattr(self, name).data_ptr())
        self._rows = rows

    def rotary(self, embeddings: Embeddings | None) -> int:
        """The address of the struct for cos and sin [1, T, dim]; None: no rotation. Most models
        pass the same two tensors to all layers of a forward."""
        if embeddings is not self._embeddings:
            self._embeddings = embeddings  # kept, or another object could have its address
            self._rotary = c_rotary(embeddings)
        return ctypes.addressof(self._rotary)


class FusedLayer:
    """Replaces a decoder layer's forward."""

    def __init__(self, parts: LayerParts, call: AttentionCall, workspace: Workspace) -> None:
        library = kernel_library()
        self._begin, self._end = library.layer_begin, library.layer_end
        self._begin.restype = self._end.restype = None
        self._begin.argtypes = _arguments("ppippi")
        self._end.argtypes = _arguments("pppippi")
        self.parts, self.call, self._workspace = parts, call, workspace
        self.stack: Stack | None = None  # to which this layer may defer its work
        self._c_layer = _c_layer(parts)
        self.c_pointer = ctypes.addressof(self._c_layer)  # a `struct layer *`
        self._work = ctypes.addressof(workspace.c_struct)
        workspace.serve(parts)
        heads = (parts.num_heads, parts.num_kv_heads, parts.num_kv_heads)
        self._heads = [count * parts.head_dim for count in heads]

    def __call__(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: Embeddings | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """[1, T, hidden] -> the same shape. Raises TypeError for an unknown argument."""
        parts = self.parts
        if unknown := unknown_arguments(others):
            raise TypeError(f"a fused layer does not support {', '.join(unknown)}")
        refuse_mask(self.call.module, attention_mask)
        if self.stack is not None:  # then the input is returned, but by a model's last layer
            deferred = self.stack(self, hidden_states, position_embeddings)
            if deferred is not None:
                return deferred
        hidden_states = hidden_states.contiguous()
        rows, threads = hidden_states.shape[1], torch.get_num_threads()
        self._workspace.reserve(rows)
        rotary = self._workspace.rotary(position_embeddings if parts.rotates else None)
        self._begin(self.c_pointer, hidden_states.data_ptr(), rows, rotary, self._work, threads)
        qkv = self._workspace.qkv[: rows * sum(self._heads)].view(1, rows, -1, parts.head_dim)
        query, key, value = qkv.transpose(1, 2).split(
            [parts.num_heads, parts.num_kv_heads, parts.num_kv_heads], dim=1
        )
        attended = attend(query, key, value, self.call).contiguous()
        out = torch.empty_like(hidden_states)
        self._end(
            self.c_pointer,
            hidden_states.data_ptr(),
            attended.data_ptr(),
            rows,
            out.data_ptr(),
            self._work,
            threads,
        )
        return out


def unknown_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """Names of the arguments that may change what a layer computes, and FusedLayer ignores."""
    return [
        name
        for name, value in arguments.items()
        if name not in _HARMLESS and value is not None and value is not False
    ]


# (layer, its input, its embeddings) -> what the layer returns, None if it must compute it itself;
# see decoder_stack.py
Stack = Callable[[FusedLayer, torch.Tensor, Embeddings | None], torch.Tensor | None]


class _Norm(ctypes.Structure):  # struct norm
    _fields_ = [("weight", ctypes.c_void_p), ("width", ctypes.c_int64), ("eps", ctypes.c_float)]


_NORMS: Final = ("input", "after_attention", "before_mlp", "after_mlp", "q", "k")
_LINEARS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate", "up", "down")
_NUMBERS: Final = (
    "hidden",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate",
    "activation",
)


_MEMORIES: Final = ("normed", "summand", "qkv", "attended", "gate_up", "scratch")


class _Layer(ctypes.Structure):  # struct layer
    _fields_ = [
        *((name, _Norm) for name in _NORMS),
        *((name, ctypes.c_void_p) for name in _LINEARS),
        *((name, ctypes.c_int64) for name in _NUMBERS),
    ]


class _Workspace(ctypes.Structure):  # struct workspace
    _fields_ = [(name, ctypes.c_void_p) for name in _MEMORIES]


class CRotary(ctypes.Structure):
    """struct rotary"""

    _fields_ = [("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p), ("dim", ctypes.c_int64)]


def c_rotary(embeddings: Embeddings | None) -> CRotary:
    """None: no rotation. The memory it points to lives as long as this struct, not as a copy."""
    made = CRotary(None, None, 0)
    if embeddings is not None:
        made.kept = cos, sin = [tensor.contiguous() for tensor in embeddings]
        made.cos, made.sin, made.dim = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
    return made


def _c_layer(parts: LayerParts) -> _Layer:
    layer = _Layer(
        hidden=parts.o.out_features,
        num_heads=parts.num_heads,
        num_kv_heads=parts.num_kv_heads,
        head_dim=parts.head_dim,
        intermediate=parts.down.in_features,
        activation=parts.activation,
    )
    for name in _NORMS:
        norm = getattr(parts, name)
        if norm is not None:
            setattr(layer, name, _Norm(norm.weight.data_ptr(), len(norm.weight), norm.eps))
    linears = (*_three(parts.qkv), parts.o, *_three(parts.gate_up)[:2], parts.down)
    for name, linear in zip(_LINEARS, linears, strict=True):
        setattr(layer, name, None if linear is None else linear.c_pointer)
    return layer


def _three(linears: tuple[PackedLinear, ...]) -> list[PackedLinear | None]:
    return [*linears, *[None] * (3 - len(linears))]


def _width(linears: Iterable[PackedLinear]) -> int:
    return sum(linear.out_features for linear in linears)


def _arguments(kinds: str) -> list[Any]:
    """ctypes for the letters p (pointer) and i (int64; the last one, threads, is an int)."""
    types = {"p": ctypes.c_void_p, "i": ctypes.c_int64}
    return [*(types[kind] for kind in kinds[:-1]), ctypes.c_int]
