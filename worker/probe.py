"""What a loaded model really does, seen in small forwards before it serves anyone.

A configuration promises layers, heads and windows; some models do otherwise, or say nothing. So
the KV cache is laid out by what layers are seen to ask of their attention. What does not fit a
paged cache is refused by name and reason:

- every layer of the model must call transformers' attention interface exactly once (some families
  never do, and would run "fine" without a KV cache, with garbage as result), with keys and values
  of one shape;
- it must see all tokens before it, or those of a window. Under our attention models make no masks,
  and not all of them name their window in the call, or mean what they name. While the probe looks,
  a mask function is registered that keeps each mask's rule: a function of two positions. It is
  asked about positions up to the model's limit, so a window of any size shows in a forward of three
  tokens;
- a step's tokens form one flat sequence, so nothing but attention may mix them, and positions must
  be those that the step gives: the same request twice in one forward must give the same twice.

Owns: these looks. Does not own: what the configuration alone rules out (model_check.py), arithmetic
of memory (geometry.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from worker.attention.interface import (
    ATTENTION_NAME,
    AttentionCall,
    UnservedAttention,
    answering,
    layer_index,
)
from worker.forward import first_tensor, run_model
from worker.geometry import SLIDING_ATTENTION, LayerShape, UnsupportedModel, layer_kinds

_TOKENS: Final = 3
_LONGEST_MASK: Final = 2**20  # positions that a mask's rule is asked about
# Of the largest value. The same request at another place of a forward: sums in another order.
_TOLERANCES: Final = {torch.float32: 1e-3, torch.float64: 1e-9}
_TOLERANCE_16_BITS: Final = 0.05
_FAILURES: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """What was seen of a model."""

    layers: tuple[LayerShape, ...]
    shared_layers: Mapping[int, int]  # layers that attend with another one's keys and values
    hidden_states: nn.Module  # the last module that gives something for every token
    read_weights: frozenset[nn.Module]  # linear layers whose weight others read: not to be packed
    vocab_size: int  # columns of the logits


def observe(model: PreTrainedModel, max_model_len: int) -> Observed:
    """Look at a model that is loaded with our attention; `max_model_len` 0: not known.

    Raises UnsupportedModel.
    """
    name = str(model.config.model_type)
    positions = torch.arange(_TOKENS, device=model.device)
    seen = _Seen()
    with (
        refusing(name),
        _masks_made(seen, max_model_len),
        _all_watched(model, seen),
        _weights_watched(model) as read_weights,
        torch.inference_mode(),
        answering(seen),
    ):
        logits = model(
            input_ids=_token_ids(model)[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=positions[-1:],
        ).logits
    layers = _layers(name, model, seen)
    if logits.shape[:2] != (1, 1) or seen.hidden_states is None:
        raise UnsupportedModel(
            f"{name}: logits_to_keep is ignored; one row was asked for, the logits have the shape "
            f"{list(logits.shape)}"
        )
    shapes = tuple(_shape_of(name, index, call, max_model_len) for index, call in enumerate(layers))
    shared = _shared_layers(layers)
    _check_against(name, model.config.get_text_config(), shapes, shared, max_model_len)
    return Observed(
        shapes, shared, seen.hidden_states, frozenset(read_weights), int(logits.shape[-1])
    )


def check_step(model: PreTrainedModel, observed: Observed) -> None:
    """Run what a step runs, as it will be run: two requests in one flat sequence, which are the
    same, without masks. Raises UnsupportedModel."""
    name = str(model.config.model_type)
    seen = _Seen()
    positions = torch.arange(_TOKENS, device=model.device).repeat(2)
    ends = torch.tensor([_TOKENS - 1, 2 * _TOKENS - 1], device=model.device)
    with refusing(name), torch.inference_mode():
        logits, hidden = run_model(
            model, observed.hidden_states, seen, _token_ids(model).repeat(2), positions, ends
        )
    if logits.shape != (2, observed.vocab_size) or hidden.shape[0] != 2 * _TOKENS:
        raise UnsupportedModel(
            f"{name}: for two of {2 * _TOKENS} tokens it gives logits of the shape "
            f"{list(logits.shape)} and hidden states of {list(hidden.shape)}"
        )
    for index, call in enumerate(_layers(name, model, seen)):
        if call.call.mask is not None:
            raise UnsupportedModel(f"{name}: layer {index} makes an attention mask of its own")
    tolerance = _TOLERANCES.get(model.dtype, _TOLERANCE_16_BITS)
    for values in (hidden, logits):
        first, second = values.float().chunk(2)
        if not (first - second).abs().max() <= tolerance * first.abs().max():
            raise UnsupportedModel(
                f"{name}: the same request twice in one step gives two different results: it mixes "
                f"the tokens of a step outside of attention, or ignores position_ids"
            )


def _token_ids(model: PreTrainedModel) -> torch.Tensor:
    embeddings = model.get_input_embeddings()
    count = getattr(embeddings, "num_embeddings", _TOKENS)
    return torch.arange(count - _TOKENS, count, device=model.device).clamp(min=0)


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Whatever a foreign model raises becomes a refusal that names the model and the error."""
    try:
        yield
    except (UnsupportedModel, torch.OutOfMemoryError):
        raise
    except UnservedAttention as error:
        raise UnsupportedModel(f"{name}: {error}") from error
    except _FAILURES as error:
        raise UnsupportedModel(
            f"{name}: a forward with the attention of this worker fails: "
            f"{type(error).__name__}: {error}"
        ) from error


# ---- what layers ask ----


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    module: nn.Module
    query: torch.Tensor  # kept: a tensor that is gone leaves its address to another one
    key: torch.Tensor
    value: torch.Tensor
    call: AttentionCall
    window: int | None  # of its mask, 0 for none; None: it has no mask


class _Seen:
    """Answers attention calls with a mix of their arguments, and keeps them."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.masks: list[tuple[torch.Tensor, int | str]] = []  # and their windows, or what is odd
        self.hidden_states: nn.Module | None = None

    def attend_layer(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
    ) -> torch.Tensor:
        kind = type(module).__name__
        if query.shape[-1] != value.shape[-1] or key.shape != value.shape:
            raise UnservedAttention(
                f"{kind} attends with queries, keys and values of the shapes {list(query.shape)}, "
                f"{list(key.shape)} and {list(value.shape)}; the KV pool needs keys and values of "
                f"one shape, and queries of the same head size"
            )
        if getattr(module, "is_causal", True) is False:
            raise UnservedAttention(f"the attention of {kind} is not causal")
        window = self._window(kind, call.mask)
        self.calls.append(_Call(module, query, key, value, call, window))
        grouped = query.shape[1] // key.shape[1]
        mixed = value + 0.1 * key
        return (mixed.repeat_interleave(grouped, dim=1) + 0.1 * query).transpose(1, 2).contiguous()

    def _window(self, kind: str, mask: torch.Tensor | None) -> int | None:
        if mask is None:
            return None
        for known, window in self.masks:
            if known.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr():
                if isinstance(window, str):
                    raise UnservedAttention(f"the attention mask of {kind} {window}")
                return window
        raise UnservedAttention(
            f"{kind} makes an attention mask of its own; {ATTENTION_NAME} serves causal attention, "
            f"whole or through a window"
        )


def _layers(name: str, model: PreTrainedModel, seen: _Seen) -> list[_Call]:
    """The one call of every layer, by index. Layers are the list of modules that callers are in."""
    paths = {module: path for path, module in model.named_modules()}
    lists: dict[str, int] = {}  # of layers that called: its path, its length
    for call in seen.calls:
        found = re.match(r"(.*?)\.\d+\.", paths.get(call.module, ""))
        if found is not None:
            holder = model.get_submodule(found[1])
            lists[found[1]] = len(holder) if isinstance(holder, nn.ModuleList) else 0
    num_layers = sum(lists.values()) or _promised_layers(model)
    by_index = {layer_index(call.module): call for call in seen.calls}
    if len(seen.calls) != num_layers or sorted(by_index) != list(range(num_layers)):
        raise UnsupportedModel(
            f"{name}: it has {num_layers} hidden layers, but its attention was called "
            f"{len(seen.calls)} times through transformers' attention interface; every layer "
            f"must call it exactly once"
        )
    return [by_index[index] for index in range(num_layers)]


def _promised_layers(model: PreTrainedModel) -> int:
    return int(getattr(model.config.get_text_config(), "num_hidden_layers", 0))


def _shape_of(name: str, index: int, seen: _Call, max_model_len: int) -> LayerShape:
    named = seen.call.sliding_window
    if 0 < max_model_len <= named:
        named = 0
    window = named if seen.window is None else seen.window
    if named not in (0, window):
        raise UnsupportedModel(
            f"{name}: layer {index} attends through a window of {named} tokens by its attention "
            f"call, but by its mask through {f'one of {window}' if window else 'full attention'}"
        )
    _, num_heads, _, head_dim = seen.query.shape
    return LayerShape(num_heads, seen.key.shape[1], head_dim, window)


def _shared_layers(layers: list[_Call]) -> dict[int, int]:
    """Layers that attend with keys and values of an earlier one: the same tensors."""
    owners: dict[tuple[int, int], int] = {}
    shared = {}
    for index, seen in enumerate(layers):
        owner = owners.setdefault((seen.key.data_ptr(), seen.value.data_ptr()), index)
        if owner != index:
            shared[index] = owner
    return shared


def _check_against(
    name: str,
    text_config: Any,
    layers: tuple[LayerShape, ...],
    shared: Mapping[int, int],
    max_model_len: int,
) -> None:
    """What transformers' own caches would do by the configuration must agree with what is seen:
    else there is no telling what the model was meant to compute."""
    promised = getattr(text_config, "num_kv_shared_layers", None) or 0
    if promised != len(shared):
        raise UnsupportedModel(
            f"{name}: num_kv_shared_layers is {promised}, but without a cache of transformers "
            f"{len(shared)} layers attend with the keys and values of another one"
        )
    for index, owner in shared.items():
        if layers[index].sliding_window != layers[owner].sliding_window:
            raise UnsupportedModel(
                f"{name}: layer {index} shares the keys of layer {owner}, but not its window"
            )
    window = getattr(text_config, "sliding_window", None) or 0
    if 0 < max_model_len <= window:
        return
    for index, (layer, kind) in enumerate(zip(layers, layer_kinds(text_config), strict=False)):
        if kind == SLIDING_ATTENTION and not layer.sliding_window:
            raise UnsupportedModel(
                f"{name}: its configuration promises layer {index} a window of {window} tokens, "
                f"but the model attends to all tokens"
            )


# ---- masks and modules ----


@contextmanager
def _masks_made(seen: _Seen, max_model_len: int) -> Iterator[None]:
    """While this holds, models make masks for our attention, each from a rule that is kept."""
    reach = max(8, min(max_model_len or 4096, _LONGEST_MASK))

    def make(
        batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any], **_: Any
    ) -> torch.Tensor:
        mask = _visible(mask_function, torch.arange(q_length), kv_length)
        mask = mask.expand(batch_size, 1, q_length, kv_length).to(_.get("device", "cpu")).clone()
        seen.masks.append((mask, _window_of(mask_function, reach)))
        return mask

    AttentionMaskInterface.register(ATTENTION_NAME, make)
    try:
        yield
    finally:
        del AttentionMaskInterface._global_mapping[ATTENTION_NAME]


def _window_of(mask_function: Callable[..., Any], reach: int) -> int | str:
    """The window of a mask's rule among `reach` positions, 0 for none; or what is wrong with it."""
    rows = torch.tensor(sorted({0, 1, reach // 3, reach // 2, max(0, reach - 2), reach - 1}))
    visible = _visible(mask_function, rows, reach)
    columns = torch.arange(reach)[None]
    if (visible & (columns > rows[:, None])).any():
        return "shows tokens that come later: it is not causal"
    window = int(visible[-1].sum())
    expected = (columns <= rows[:, None]) & (columns > rows[:, None] - window)
    if not torch.equal(visible, expected):
        return "is neither causal nor a window: which tokens it hides follows another rule"
    return 0 if window == reach else window


def _visible(mask_function: Callable[..., Any], rows: torch.Tensor, columns: int) -> torch.Tensor:
    """bool [rows, columns] of the rule: what a query at each of these positions sees."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    visible = mask_function(
        zero, zero, rows[None, None, :, None], torch.arange(columns)[None, None, None]
    )
    return torch.as_tensor(visible).expand(1, 1, len(rows), columns)[0, 0]


@contextmanager
def _all_watched(model: PreTrainedModel, seen: _Seen) -> Iterator[None]:
    """Finds the last module to end that gives something for every token: the one that hidden states
    come from, whatever a family calls it, and whichever module its forward passes by."""

    def after(module: nn.Module, _inputs: Any, output: Any) -> None:
        try:
            first = first_tensor(output)
        except (KeyError, IndexError, TypeError):
            return
        if isinstance(first, torch.Tensor) and first.shape[:2] == (1, _TOKENS):
            seen.hidden_states = module

    hooks = [part.register_forward_hook(after) for part in model.modules() if part is not model]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _weights_watched(model: PreTrainedModel) -> Iterator[set[nn.Module]]:
    """Gives the set of linear layers whose weight is read by others than themselves: a router that
    looks up its own dtype, or multiplies by hand. Packed, they would have none to give."""
    read: set[nn.Module] = set()
    kinds = {kind: _watching(kind, read) for kind in (nn.Linear, Conv1D)}
    layers = [module for module in model.modules() if type(module) in kinds]
    for layer in layers:
        layer.__class__ = kinds[type(layer)]
    try:
        yield read
    finally:
        for layer in layers:
            layer.__class__ = type(layer).__base__


def _watching(kind: type[nn.Module], read: set[nn.Module]) -> type[nn.Module]:
    class Watched(kind):  # type: ignore[misc, valid-type]
        def __getattr__(self, name: str) -> Any:
            if name == "weight" and not vars(self).get("computes"):
                read.add(self)
            return super().__getattr__(name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            vars(self)["computes"] = True
            try:
                return super().forward(x)
            finally:
                del vars(self)["computes"]

    return Watched
