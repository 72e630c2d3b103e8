"""The attention function that transformers models call, and what it needs to know of a step.

A model calls `chairlift_paged` once per layer, without a cache and without a mask. What the call
cannot carry (some models drop keyword arguments) lies in a module-level variable for the length of
one forward: the StepContext. The function writes the layer's new keys and values into the pool
through slot_mapping, then lets the backend attend through the block tables.

Owns: the registration, the context, the seam between model and backend. Does not own: arithmetic
(reference.py, cpu.py), or how a plan becomes tables (worker/batch/inputs.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch
from torch import nn

from worker.batch.inputs import StepInputs
from worker.kv.kv_pool import KvPool

# Must not contain `flash`, `sdpa` or `flex_attention`, nor look like `org/name`: transformers
# treats such names in special ways.
ATTENTION_NAME: Final = "chairlift_paged"

# Keyword arguments of models that change nothing here. What a step needs of them reaches attention
# by other ways; the rest concern training, caches and outputs that are not asked for.
_HARMLESS: Final = frozenset(
    {
        "cache",
        "cache_position",
        "config",
        "deterministic",
        "dropout",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_value",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "training",
        "use_cache",
    }
)


class UnservedAttention(RuntimeError):
    """A layer asks its attention for something that the paged kernels do not compute."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupTables:
    """One cache group's tables on the device. R requests, T tokens, padding included."""

    table_start: torch.Tensor  # int32 [R+1] into blocks
    blocks: torch.Tensor  # int32 [B]
    first_positions: torch.Tensor  # int32 [R] token position at which the table starts
    slot_mapping: torch.Tensor  # int64 [T] block * page_size + offset


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer asks of its attention beside tensors."""

    scaling: float
    sliding_window: int = 0  # 0 = none; counts the current token
    softcap: float = 0.0  # 0 = none; else scores become softcap * tanh(score / softcap)
    sinks: torch.Tensor | None = None  # [H] one more softmax logit per head, without a value
    mask: torch.Tensor | None = None  # made only while probe.py looks; a step refuses it


class AttentionBackend(Protocol):
    """Writes and reads one layer's pages [num_blocks, 2, Hkv, page_size, D].

    `context` holds the step's lengths, `tables` those of the layer's cache group. On CUDA both
    methods may run while a graph is captured: then nothing that varies from step to step may come
    from the host, but for the bounds that a graph fixes (the tensors' shapes, longest_query).
    """

    name: str

    def begin_step(self, context: StepContext) -> None:
        """Once per forward, before the first layer: what all layers share is worked out here."""
        ...

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: torch.Tensor,
        context: StepContext,
        tables: GroupTables,
        call: AttentionCall,
    ) -> torch.Tensor:
        """Put key and value [T, Hkv, D] into their slots; then causal attention of query
        [T, H, D] over what each request's table names: [T, H, D]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """One forward's metadata. R requests, padding included; a padding request may have no token
    and a sequence of none."""

    backend: AttentionBackend
    pool: KvPool
    query_start_loc: torch.Tensor  # int32 [R+1]
    seq_lens: torch.Tensor  # int32 [R]
    groups: tuple[GroupTables, ...]
    longest_query: int  # no request has more tokens in this step; fixed while a graph is captured
    on_host: StepInputs | None  # the same as numpy arrays, for backends that loop over requests

    def attend_layer(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
    ) -> torch.Tensor:
        """query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D]."""
        refuse_mask(module, call.mask)
        group, pages = self.pool.layer_views(layer_index(module))
        call = with_window_of(self.pool, group, call)
        tables = self.groups[group]
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return self.backend.attend(query, key, value, pages, self, tables, call)[None]


class LayerHandler(Protocol):
    """What answers a layer's call: a StepContext, or what looks at a model when it is loaded."""

    def attend_layer(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
    ) -> torch.Tensor: ...


_handler: LayerHandler | None = None


@contextmanager
def answering(handler: LayerHandler) -> Iterator[None]:
    """While this holds, `handler` answers the attention calls of the model that runs.

    One forward at a time in a process; a second one inside the first is a bug.
    """
    global _handler
    if _handler is not None:
        raise RuntimeError("a forward began while another one was running in this process")
    _handler = handler
    try:
        yield
    finally:
        _handler = None


def chairlift_paged(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: [1, H, T, D] and [1, Hkv, T, D] in, [1, T, H, D] out.

    Raises UnservedAttention for a keyword argument that is not known to change nothing.
    """
    for name, argument in others.items():
        if argument is not None and name not in _HARMLESS:
            _refuse_argument(module, name, argument)
    call = AttentionCall(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
        mask=attention_mask,
    )
    return attend_layer(module, query, key, value, call), None


def _refuse_argument(module: nn.Module, name: str, argument: Any) -> None:
    if name == "is_causal":
        if argument is not False:
            return
        raise UnservedAttention(
            f"{type(module).__name__} asks for attention that is not causal (is_causal=False); a "
            f"KV cache needs causal attention"
        )
    raise UnservedAttention(
        f"{type(module).__name__} passes {name} to its attention, which {ATTENTION_NAME} does not "
        f"know; it would be left out of the result"
    )


def attend_layer(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
) -> torch.Tensor:
    """The running step's answer to a layer's call; see StepContext.attend_layer."""
    if _handler is None:
        raise RuntimeError(f"{ATTENTION_NAME} was called outside of a step: there is no context")
    return _handler.attend_layer(module, query, key, value, call)


def running_step() -> StepContext | None:
    """The step whose forward runs; None where there is none, or something else answers."""
    return _handler if isinstance(_handler, StepContext) else None


def with_window_of(pool: KvPool, group: int, call: AttentionCall) -> AttentionCall:
    """What a layer of cache group `group` asks for: some models apply the window through a mask
    only, so the configuration decides."""
    window = pool.geometry.groups[group].sliding_window
    if call.sliding_window == window:
        return call
    return replace(call, sliding_window=window)


def refuse_mask(module: nn.Module, attention_mask: torch.Tensor | None) -> None:
    """Raises UnservedAttention where a model makes a mask after all."""
    if attention_mask is not None:
        raise UnservedAttention(
            f"{type(module).__name__} makes an attention mask of its own; {ATTENTION_NAME} serves "
            f"causal attention, whole or through a window"
        )


def register() -> None:
    """Make the function known to transformers. No mask function is registered under its name, so
    that models create no masks."""
    from transformers import AttentionInterface  # heavy, and needed here only

    AttentionInterface.register(ATTENTION_NAME, chairlift_paged)


def layer_index(module: nn.Module) -> int:
    """The layer that an attention module belongs to."""
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise RuntimeError(f"{type(module).__name__} does not know its layer_idx")
    return index
