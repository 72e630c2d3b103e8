"""Pins rotary embeddings that depend on the longest request of a batch to one length.

longrope has two sets of frequencies, and transformers picks one per forward, by its largest
position. All requests of a step are one flat sequence, so one long request would change the results
of its neighbours, and keys already stored would no longer match. Here one set is chosen at load:
the long one if max_model_len exceeds the length that the model was first trained with, as
transformers does for a request of max_model_len tokens.

Owns: finding such embeddings, the choice, the proof that it holds. Does not own: dynamic RoPE,
which has a continuum of frequencies and is refused (model_check.py).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from worker.kv.geometry import UnsupportedModel

LONGROPE: Final = "longrope"
_NOT_UPDATED: Final = "default"  # a kind that transformers does not update in a forward


def pin_longrope(model: PreTrainedModel, max_model_len: int) -> None:
    """Sets the frequencies of every longrope embedding to those for max_model_len tokens.

    Raises UnsupportedModel if an embedding still depends on the batch, or differs from transformers
    for a request of that length.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            kinds = {None: kinds}
        if isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if kind == LONGROPE:
                    _pin(module, layer_type, max_model_len, str(model.config.model_type))


def _pin(module: Any, layer_type: str | None, max_model_len: int, name: str) -> None:
    options = {} if layer_type is None else {"layer_type": layer_type}
    prefix = "" if layer_type is None else f"{layer_type}_"
    current = getattr(module, f"{prefix}inv_freq")
    last = torch.tensor([[0, 1, max_model_len - 1]], device=current.device)
    sample = torch.zeros(1, device=current.device)
    with torch.inference_mode():
        wanted = module(sample, last, **options)
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[LONGROPE](
        module.config, current.device, seq_len=max_model_len, **options
    )
    module.register_buffer(f"{prefix}inv_freq", inv_freq, persistent=False)
    setattr(module, f"{prefix}attention_scaling", scaling)
    if layer_type is None:
        module.rope_type = _NOT_UPDATED
    else:
        module.rope_type = {**module.rope_type, layer_type: _NOT_UPDATED}
    _check(module, options, wanted, last, sample, name)


def _check(
    module: nn.Module,
    options: dict[str, str],
    wanted: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    sample: torch.Tensor,
    name: str,
) -> None:
    """The pinned embedding must return what transformers returned for all positions together, and
    the same for the first ones alone."""
    with torch.inference_mode():
        together = module(sample, positions, **options)
        alone = module(sample, positions[:, :2], **options)
    for before, all_, first in zip(wanted, together, alone, strict=True):
        if not torch.equal(before, all_) or not torch.equal(before[:, :2], first):
            raise UnsupportedModel(
                f"{name}: its {LONGROPE} embedding ({type(module).__name__}) cannot be pinned to "
                f"one length: it depends on the longest request of a batch in a way of its own"
            )
