"""Adapts families whose modules would prevent serving them.

- falcon and gpt_neo choose their attention class from a table of their own: an adapted class is
  added there. It computes what theirs does around attention, and calls the attention interface.
- bart's relatives count positions from 0 in every forward, ignoring position_ids; their position
  embeddings receive the step's positions instead.

Owns: these adaptations. Does not own: checking that they work (probe.py), attention itself.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from worker.attention.interface import ATTENTION_NAME, UnservedAttention, chairlift_paged
from worker.kv.geometry import UnsupportedModel


@contextmanager
def adapted_classes(model_type: str) -> Iterator[None]:
    """Inside, a model of this type can be built with our attention.

    Raises UnsupportedModel for a family with an attention table that is not known here.
    """
    enter = _TABLES.get(model_type)
    if enter is not None:
        enter()
    try:
        yield
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise
        raise UnsupportedModel(
            f"{model_type}: it takes its attention from a table of its own classes, where it "
            f"cannot be replaced"
        ) from error


def _enter_falcon() -> None:
    falcon = importlib.import_module("transformers.models.falcon.modeling_falcon")

    class PagedFalconAttention(falcon.FalconAttention):  # type: ignore[name-defined]
        def forward(
            self,
            hidden_states: torch.Tensor,
            alibi: torch.Tensor | None,
            attention_mask: torch.Tensor | None,
            position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
            **_others: Any,
        ) -> tuple[torch.Tensor, None]:
            if alibi is not None:
                raise UnservedAttention(
                    "its configuration asks for ALiBi (alibi is true), a bias by distance that "
                    "this worker's attention does not compute"
                )
            parts = self._split_heads(self.query_key_value(hidden_states))
            query, key, value = (part.transpose(1, 2) for part in parts)
            if self.new_decoder_architecture:  # keys are repeated for every query head
                repeated = self.num_heads // self.num_kv_heads
                key, value = key[:, ::repeated], value[:, ::repeated]
            assert position_embeddings is not None
            query, key = falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
            attended, _ = chairlift_paged(self, query, key, value, attention_mask)
            return self.dense(attended.flatten(2)), None

    falcon.FALCON_ATTENTION_CLASSES[ATTENTION_NAME] = PagedFalconAttention


def _enter_gpt_neo() -> None:
    gpt_neo = importlib.import_module("transformers.models.gpt_neo.modeling_gpt_neo")

    class PagedGPTNeoAttention(gpt_neo.GPTNeoSelfAttention):  # type: ignore[name-defined]
        def __init__(self, config: Any, attention_type: str, layer_id: int | None = None) -> None:
            super().__init__(config, attention_type, layer_id)
            self.layer_idx = layer_id
            self.window = config.window_size if attention_type == "local" else None

        def _attn(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None = None,
        ) -> tuple[torch.Tensor, None]:
            # the model's mask is only causal: windows are in the masks of its layers
            attended, _ = chairlift_paged(
                self, query, key, value, None, scaling=1.0, sliding_window=self.window
            )
            return attended.transpose(1, 2), None

    gpt_neo.GPT_NEO_ATTENTION_CLASSES[ATTENTION_NAME] = PagedGPTNeoAttention


_TABLES: Final[dict[str, Callable[[], None]]] = {
    "falcon": _enter_falcon,
    "gpt_neo": _enter_gpt_neo,
}


def place_positions(model: nn.Module) -> None:
    """Makes modules that count positions themselves use those passed to the model."""
    embeddings = [
        embedding
        for module in model.modules()
        for name, embedding in module.named_children()
        if name == "embed_positions"
        and "position_ids" not in inspect.signature(module.forward).parameters
        and "position_ids" in inspect.signature(embedding.forward).parameters
    ]
    if not embeddings:
        return
    positions: list[torch.Tensor] = []  # of the current forward

    def record(_: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions[:] = [kwargs["position_ids"][0]]

    def insert(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "position_ids": positions[0]}

    model.register_forward_pre_hook(record, with_kwargs=True)
    for embedding in embeddings:
        embedding.register_forward_pre_hook(insert, with_kwargs=True)
