"""The attention function that transformers models call, and the path from it to a backend.

A model calls `chairlift_paged` once per layer, without a cache and without a mask. The call becomes
an AttentionCall, which a handler computes: `attend(query, key, value, call)`. Some models drop
keyword arguments, so the handler is a module-level variable for the duration of a forward. In a
step it is PagedAttention: its backend writes the layer's new keys and values into the pool through
slot_mapping, then attends through the block tables.

Owns: the registration, the call, the step's context. Does not own: arithmetic (reference.py,
cpu.py, cuda.py), how a plan becomes tables (worker/batch/inputs.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from torch import Tensor, nn

from worker.batch.inputs import StepInputs
from worker.kv.kv_pool import KvPool

# Must not contain `flash`, `sdpa` or `flex_attention`, nor look like `org/name`: transformers
# treats such names in special ways.
ATTENTION_NAME: Final = "chairlift_paged"

# Keyword arguments that change nothing here: a step passes their information in other ways, or
# they concern training, caches and outputs that nobody requests.
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
    """A layer needs attention that the paged kernels do not compute."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupTables:
    """One cache group's tables on the device. R requests, T tokens, padding included."""

    table_start: Tensor  # int32 [R+1] into blocks
    blocks: Tensor  # int32 [B]
    first_positions: Tensor  # int32 [R] token position at which the table starts
    slot_mapping: Tensor  # int64 [T] block * page_size + offset


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer asks of its attention, besides queries, keys and values."""

    module: nn.Module  # the layer's attention module
    scaling: float
    sliding_window: int = 0  # 0 = none; counts the current token
    softcap: float = 0.0  # 0 = none; else scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # [H] one more softmax logit per head, without a value
    mask: Tensor | None = None  # only probe.py lets models make one; a step refuses it

    @property
    def layer(self) -> int:
        """The layer's index. Raises RuntimeError for a module that does not know it."""
        index = getattr(self.module, "layer_idx", None)
        if not isinstance(index, int):
            raise RuntimeError(f"{type(self.module).__name__} does not know its layer_idx")
        return index


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """One forward's metadata. R requests, padding included; a padding request may have no token
    and an empty sequence."""

    pool: KvPool
    query_start_loc: Tensor  # int32 [R+1]
    seq_lens: Tensor  # int32 [R]
    groups: tuple[GroupTables, ...]
    longest_query: int  # no request has more tokens in this step; fixed while a graph is captured
    on_host: StepInputs | None  # the same as numpy arrays, for backends that loop over requests


class AttentionBackend(Protocol):
    """Writes and reads the pages of the layers, [num_blocks, 2, Hkv, page_size, D] each.

    On CUDA both methods may run while a graph is captured: then nothing that varies from step to
    step may come from the host, except the bounds that a graph fixes (the tensors' shapes,
    longest_query).
    """

    name: str

    def begin_step(self, step: StepContext) -> None:
        """Once per forward, before the first layer: computes what all layers share."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """Writes key and value [T, Hkv, D] into their slots, then computes causal attention of
        query [T, H, D] over each request's block table: [T, H, D]."""
        ...


class AttentionHandler(Protocol):
    """Computes a model's attention calls: those of a step, or stand-ins while a model is examined
    at load."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PagedAttention:
    """The handler of a step: `backend`, for which the step has begun, over the step's pool."""

    backend: AttentionBackend
    step: StepContext

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        refuse_mask(call.module, call.mask)
        call = with_window_of(self.step.pool, call)
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return self.backend.attend(query, key, value, call)[None]


class StandIn:
    """A handler that mixes its arguments, row by row: for looking at what a model computes around
    attention."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        width, grouped = value.shape[-1], query.shape[1] // value.shape[1]
        mixed = (value + 0.1 * key[..., :width]).repeat_interleave(grouped, dim=1)
        return (mixed + 0.1 * query[..., :width]).transpose(1, 2).contiguous()


_handler: AttentionHandler | None = None


@contextmanager
def answering(handler: AttentionHandler) -> Iterator[None]:
    """Inside, `handler` computes the attention calls of models.

    A process runs one forward at a time; a second one inside the first is a bug.
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, H, T, D] and [1, Hkv, T, D] in, [1, T, H, D] out.

    Raises UnservedAttention for a keyword argument that is not known to be harmless.
    """
    for name, argument in others.items():
        if argument is not None and name not in _HARMLESS:
            _refuse_argument(module, name, argument)
    call = AttentionCall(
        module=module,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
        mask=attention_mask,
    )
    return attend(query, key, value, call), None


def _refuse_argument(module: nn.Module, name: str, argument: Any) -> None:
    if name == "is_causal":
        if argument is not False:
            return
        raise UnservedAttention(
            f"{type(module).__name__} needs attention that is not causal (is_causal=False); a KV "
            f"cache needs causal attention"
        )
    raise UnservedAttention(
        f"{type(module).__name__} passes {name} to its attention, which {ATTENTION_NAME} does not "
        f"support and would ignore"
    )


def attend(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """What the current handler computes; see AttentionHandler."""
    if _handler is None:
        raise RuntimeError(f"{ATTENTION_NAME} was called outside of a step: it has no handler")
    return _handler.attend(query, key, value, call)


def running_step() -> PagedAttention | None:
    """The handler of the step whose forward is running; None outside of a step's forward."""
    return _handler if isinstance(_handler, PagedAttention) else None


def with_window_of(pool: KvPool, call: AttentionCall) -> AttentionCall:
    """`call` with the window of the layer's cache group: some models apply their window through a
    mask only, so the pool's geometry decides."""
    group, _ = pool.layer_views(call.layer)
    window = pool.geometry.groups[group].sliding_window
    if call.sliding_window == window:
        return call
    return replace(call, sliding_window=window)


def refuse_mask(module: nn.Module, attention_mask: Tensor | None) -> None:
    """Raises UnservedAttention if a model makes a mask after all."""
    if attention_mask is not None:
        raise UnservedAttention(
            f"{type(module).__name__} makes an attention mask of its own; {ATTENTION_NAME} serves "
            f"causal attention, full or within a window"
        )


def register() -> None:
    """Registers the function with transformers. No mask function is registered under its name, so
    that models create no masks."""
    from transformers import AttentionInterface  # heavy, and needed only here

    AttentionInterface.register(ATTENTION_NAME, chairlift_paged)
