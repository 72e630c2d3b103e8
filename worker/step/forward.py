"""One ragged forward: from inputs on the device to logits, without waiting for the device.

All requests of a step form one flat sequence, [1, T]; only attention knows, from the StepContext,
which token belongs to which request.

Owns: calling the model, in a step and in the checks at load (probe.py); which tokens stayed finite.
Does not own: where inputs come from (io_buffers.py), whether the forward is replayed from a graph
(graphs.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from worker.attention.interface import (
    AttentionBackend,
    AttentionHandler,
    PagedAttention,
    StepContext,
    answering,
)
from worker.batch.inputs import StepInputs
from worker.kv.kv_pool import KvPool
from worker.step.io_buffers import DeviceInputs


@dataclass(frozen=True, slots=True, eq=False)
class Forwarded:
    """T tokens and L logits, padding included."""

    logits: torch.Tensor  # [L, V] in the model's dtype
    is_token_finite: torch.Tensor  # bool [T] of the last hidden state, all of it
    is_logits_finite: torch.Tensor  # bool [L] of the largest; unused columns may hold -inf


class Forward:
    """The model with its memory. `hidden_states` is the module that returns the last hidden states
    of all tokens, `last_token` int64 [rows] the token that each row sampled last."""

    def __init__(
        self,
        model: PreTrainedModel,
        hidden_states: nn.Module,
        backend: AttentionBackend,
        pool: KvPool,
        last_token: torch.Tensor,
    ) -> None:
        self._model, self._hidden_states = model, hidden_states
        self._backend = backend
        self._pool = pool
        self._last_token = last_token

    def __call__(
        self, inputs: DeviceInputs, longest_query: int, on_host: StepInputs | None
    ) -> Forwarded:
        """`on_host` is None while a graph is captured: then nothing may come from the host."""
        token_ids = torch.where(
            inputs.token_ids < 0, self._last_token[inputs.token_rows], inputs.token_ids
        )
        step = StepContext(
            pool=self._pool,
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            groups=inputs.groups,
            longest_query=longest_query,
            on_host=on_host,
        )
        self._backend.begin_step(step)
        logits, hidden = run_model(
            self._model,
            self._hidden_states,
            PagedAttention(self._backend, step),
            token_ids,
            inputs.positions,
            inputs.logits_indices,
        )
        return Forwarded(
            logits=logits,
            is_token_finite=torch.isfinite(hidden).all(dim=-1),
            is_logits_finite=torch.isfinite(logits.amax(dim=-1)),
        )


def run_model(
    model: PreTrainedModel,
    hidden_states: nn.Module,
    handler: AttentionHandler,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    logits_indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward over token_ids [T] at positions [T], with attention by `handler`. Returns the
    logits [L, V] of the tokens at logits_indices [L], and the output [T, hidden] of the model's
    module `hidden_states`.

    Raises RuntimeError if that module is not called exactly once.
    """
    seen: list[torch.Tensor] = []
    hook = hidden_states.register_forward_hook(
        lambda _module, _inputs, output: seen.append(first_tensor(output))
    )
    try:
        with answering(handler):
            logits = model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=logits_indices,
            ).logits
    finally:
        hook.remove()
    if len(seen) != 1:
        raise RuntimeError(
            f"{type(hidden_states).__name__}, whose output is checked, was called {len(seen)} "
            f"times in one forward; it must be called once"
        )
    return logits[0], seen[0][0]


def first_tensor(output: Any) -> Any:
    """The hidden states in a module's output: the output itself, or its first item."""
    return output if isinstance(output, torch.Tensor) else output[0]
