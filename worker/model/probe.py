"""What a loaded model really does, observed in small forwards before it serves anyone.

A configuration states layers, heads and windows; some models do otherwise, or state nothing. So the
KV cache is laid out by the observed attention calls of the layers. What does not fit a paged cache
is refused by name and reason:

- every layer of the model must call transformers' attention interface exactly once (some families
  never do, and would run "fine" without a KV cache, producing garbage), with keys and values of one
  shape;
- every token must attend to all tokens before it, or to a window. With our attention models make no
  masks, and not all of them pass their window in the call, or mean what they pass. So while the
  model is observed, a registered mask function records each mask's rule, a function of two
  positions. The rule is evaluated at positions up to the model's limit, so that a forward of three
  tokens reveals a window of any size;
- a step's tokens form one flat sequence, so nothing but attention may mix them, and the model must
  use the step's positions: a request's result must be the same wherever it is in a step.

Owns: these checks. Does not own: what the configuration alone rules out (model_check.py),
arithmetic of memory (geometry.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from worker.attention.interface import AttentionCall, StandIn, UnservedAttention, answering
from worker.kv.geometry import SLIDING_ATTENTION, LayerShape, UnsupportedModel, layer_kinds
from worker.model.watching import Masks, last_module_found, masks_made, weights_watched
from worker.step.forward import run_model

_TOKENS: Final = 3
# Relative to the largest value. The same request at another place of a forward has its sums in
# another order; and in 16 bits a router may choose another expert.
_TOLERANCES: Final = {torch.float32: 1e-3, torch.float64: 1e-9}
_TOLERANCE_16_BITS: Final = 0.25
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
    """Facts observed in a model's forward."""

    layers: tuple[LayerShape, ...]
    shared_layers: Mapping[int, int]  # layers that use another layer's keys and values
    hidden_states: nn.Module  # the last module with an output for every token
    read_weights: frozenset[nn.Module]  # linear layers whose weight others read: never packed
    vocab_size: int  # columns of the logits


def observe(model: PreTrainedModel, max_model_len: int) -> Observed:
    """Observes a model that is loaded with our attention; `max_model_len` 0: unknown.

    Raises UnsupportedModel.
    """
    name = str(model.config.model_type)
    positions = torch.arange(_TOKENS, device=model.device)
    with (
        refusing(name),
        masks_made(max_model_len) as masks,
        last_module_found(model, _TOKENS) as last,
        weights_watched(model) as read_weights,
        torch.inference_mode(),
    ):
        seen = _Seen(masks)
        with answering(seen):
            logits = model(
                input_ids=_token_ids(model)[None, _TOKENS:],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=positions[-1:],
            ).logits
    layers = _layers(name, model, seen)
    if logits.shape[:2] != (1, 1) or not last:
        raise UnsupportedModel(
            f"{name}: logits_to_keep is ignored; one row was asked for, the logits have the shape "
            f"{list(logits.shape)}"
        )
    shapes = tuple(_shape_of(name, index, call, max_model_len) for index, call in enumerate(layers))
    shared = _shared_layers(layers)
    _check_against(name, model.config.get_text_config(), shapes, shared, max_model_len)
    return Observed(shapes, shared, last[0], frozenset(read_weights), int(logits.shape[-1]))


def check_step(model: PreTrainedModel, observed: Observed, max_model_len: int) -> None:
    """Runs the model as steps will, without masks: a request first and last in one flat sequence,
    with another one between them at the model's last positions; and once more first, before others.
    Its results must be the same each time. All sequences have the same length, because rounding may
    depend on the shape of a batch. Raises UnsupportedModel."""
    name = str(model.config.model_type)
    one, other = _token_ids(model).chunk(2)
    begin = torch.arange(_TOKENS, device=model.device)
    end = begin + max(0, max_model_len - _TOKENS)
    logits_indices = torch.tensor([_TOKENS - 1, 3 * _TOKENS - 1], device=model.device)
    found = []
    for tokens, positions in (
        ((one, other, one), (begin, end, begin)),
        ((one, other.flip(0), other), (begin, begin, begin)),
    ):
        seen = _Seen(Masks(are_made=False))
        with refusing(name), torch.inference_mode():
            logits, hidden = run_model(
                model,
                observed.hidden_states,
                seen,
                torch.cat(tokens),
                torch.cat(positions),
                logits_indices,
            )
        _layers(name, model, seen)
        if len(logits) != len(logits_indices) or len(hidden) != 3 * _TOKENS:
            raise UnsupportedModel(
                f"{name}: asked for logits of {len(logits_indices)} of {3 * _TOKENS} tokens, it "
                f"gives {len(logits)} rows of logits and {len(hidden)} of hidden states"
            )
        found.append((hidden[:_TOKENS], logits[:1]))
        if tokens[2] is one:
            found.append((hidden[-_TOKENS:], logits[1:]))
    tolerance = _TOLERANCES.get(model.dtype, _TOLERANCE_16_BITS)
    for what, values in zip(("hidden states", "logits"), zip(*found, strict=True), strict=True):
        first, *others = (value.float() for value in values)
        if not torch.isfinite(first.amax(dim=-1)).all():  # -inf for unused columns is no fault
            kind = str(model.dtype).removeprefix("torch.")
            raise UnsupportedModel(f"{name}: its {what} are not finite in {kind}")
        error = max(torch.where(x == first, 0, x - first).abs().max() for x in others)
        if not error <= tolerance * first[first.isfinite()].abs().max():
            raise UnsupportedModel(
                f"{name}: a request's {what} depend on which others are in the same step: it mixes "
                f"the tokens of a step outside of attention, or does not follow position_ids"
            )


def _token_ids(model: PreTrainedModel) -> Tensor:
    """Tokens of two requests: the last of the vocabulary, because the first may be padding."""
    count = getattr(model.get_input_embeddings(), "num_embeddings", 2 * _TOKENS)
    return torch.arange(count - 2 * _TOKENS, count, device=model.device).clamp(min=0)


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Turns whatever a foreign model raises into a refusal that names the model and the error."""
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
    query: Tensor  # kept alive: the address of a freed tensor may be reused
    key: Tensor
    value: Tensor
    call: AttentionCall
    window: int | None  # by its mask, 0 for none; None: no mask, or one that does not tell


class _Seen(StandIn):
    """Records the attention calls of a forward."""

    def __init__(self, masks: Masks) -> None:
        self.calls: list[_Call] = []
        self._masks = masks

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        module = call.module
        kind = type(module).__name__
        shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
        _, num_heads, num_tokens, head_dim = shapes[0]
        if key.shape != value.shape or shapes[1][2:] != (num_tokens, head_dim):
            raise UnservedAttention(
                f"{kind} attends with queries, keys and values of "
                f"{', '.join(map(_plain, shapes))}; the KV pool needs as many keys and values as "
                f"queries, all of one size"
            )
        if num_heads % shapes[1][1]:
            raise UnservedAttention(
                f"{kind} attends with {num_heads} query heads to {shapes[1][1]} KV heads; the one "
                f"must be a multiple of the other"
            )
        window: int | str | None = None
        if call.mask is not None:
            window = self._masks.window_of(call.mask)
            if isinstance(window, str):
                raise UnservedAttention(f"the attention mask of {kind} {window}")
        elif self._masks.are_made and getattr(module, "is_causal", True) is False:
            raise UnservedAttention(f"the attention of {kind} is not causal, and has no mask")
        assert not isinstance(window, str)
        self.calls.append(_Call(query, key, value, call, window))
        return super().attend(query, key, value, call)


def _plain(shape: tuple[int, ...]) -> str:
    _, heads, tokens, size = shape
    return f"{heads} heads x {tokens} tokens x {size}"


def _layers(name: str, model: PreTrainedModel, seen: _Seen) -> list[_Call]:
    """The one call of every layer, by index. Layers are those of the lists that contain callers."""
    paths = {module: path for path, module in model.named_modules()}
    lists: dict[str, int] = {}  # of layers that called: its path, its length
    for seen_call in seen.calls:
        found = re.match(r"(.*?)\.\d+\.", paths.get(seen_call.call.module, ""))
        if found is not None:
            holder = model.get_submodule(found[1])
            lists[found[1]] = len(holder) if isinstance(holder, nn.ModuleList) else 0
    num_layers = sum(lists.values()) or _promised_layers(model)
    by_index = {seen_call.call.layer: seen_call for seen_call in seen.calls}
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
    """Layers that use the keys and values of an earlier layer, the same tensors -> that layer."""
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
    """Checks that the observations agree with what transformers' own caches would do by the
    configuration: else it is unclear what the model is meant to compute."""
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
