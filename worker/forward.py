"""One ragged forward: from inputs on the device to logits, without asking the device anything.

All requests of a step form one flat sequence, [1, T]; what belongs to whom is told to attention
through the StepContext alone.

Owns: the call of the model, which tokens stayed finite. Does not own: where inputs come from
(io_buffers.py), whether this is replayed from a graph (graphs.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from worker.attention.interface import AttentionBackend, StepContext, answering
from worker.inputs import StepInputs
from worker.io_buffers import DeviceInputs
from worker.kv_pool import KvPool


@dataclass(frozen=True, slots=True, eq=False)
class Forwarded:
    """T tokens and L logits, padding included."""

    logits: torch.Tensor  # [L, V] in the model's dtype
    is_token_finite: torch.Tensor  # bool [T] every number of the last hidden state
    is_logits_finite: torch.Tensor  # bool [L] the largest; some models give -inf to unused columns


class Forward:
    """The model with its memory; `last_token` int64 [rows] is what each row sampled last."""

    def __init__(
        self,
        model: PreTrainedModel,
        backend: AttentionBackend,
        pool: KvPool,
        last_token: torch.Tensor,
    ) -> None:
        self._model = model
        self._backend = backend
        self._pool = pool
        self._last_token = last_token

    def __call__(
        self, inputs: DeviceInputs, longest_query: int, on_host: StepInputs | None
    ) -> Forwarded:
        """`on_host` is None while a graph is captured: nothing may come from the host then."""
        token_ids = torch.where(
            inputs.token_ids < 0, self._last_token[inputs.token_rows], inputs.token_ids
        )
        context = StepContext(
            backend=self._backend,
            pool=self._pool,
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            groups=inputs.groups,
            longest_query=longest_query,
            on_host=on_host,
        )
        self._backend.begin_step(context)
        with answering(context), _watching(self._model.base_model) as hidden:
            logits = self._model(
                input_ids=token_ids[None],
                position_ids=inputs.positions[None],
                use_cache=False,
                logits_to_keep=inputs.logits_indices,
            ).logits[0]
        return Forwarded(
            logits=logits,
            is_token_finite=torch.isfinite(hidden[0][0]).all(dim=-1),
            is_logits_finite=torch.isfinite(logits.amax(dim=-1)),
        )


@contextmanager
def _watching(base_model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Gives a list that the last hidden states [1, T, hidden] are put into, as they pass by."""
    seen: list[torch.Tensor] = []
    hook = base_model.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
    try:
        yield seen
    finally:
        hook.remove()
