"""Runs one step: pre-ops, one ragged forward, sampling, the result.

Owns: the order of a step, the last sampled token of every row, and the judgement which rows stayed
finite. Does not own: attention and KV memory (attention/, kv_pool.py), deriving inputs
(inputs.py), choosing tokens (sampler.py), when a step runs (loop.py).

All requests of a step form one flat sequence, [1, T]; what belongs to whom is told to attention
through the StepContext alone. In deterministic mode a model with linear layers that are not packed
gets its token rows and logits rows padded to multiples of four: torch's matrix products share rows
out to threads by fours, and give a row the same bits in any share of four or more, other bits in a
smaller one (measured). Packed layers need no padding. model_check.py tries the model at hand.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

from protos import link_pb2
from protos.plan import Float32, Int32, StepPlan, StepResult
from worker.attention import choose_backend
from worker.attention.interface import GroupTables, StepContext, answering
from worker.inputs import StepInputs, prepare_inputs
from worker.kv_pool import KvPool
from worker.load import LoadedModel
from worker.memory import plan_memory
from worker.model_check import check_row_bits
from worker.packing import is_packed
from worker.swap import SwapPool

# (logits float32 [S, V], temperature, top_k, top_p, min_p, u: each [S]) -> token ids int64 [S]
Sample = Callable[[torch.Tensor, Float32, Int32, Float32, Float32, Float32], torch.Tensor]

_logger = logging.getLogger(__name__)

_UNPACKED_ROWS: Final = 4  # deterministic token and logits rows come in multiples of this
_FIRST_ROWS: Final = 64  # rows of the per-row tables at start; they grow as rows appear
_NOTHING: Final = np.empty(0, np.int32)


class Runner:
    """One model with its KV pool. Not thread-safe: one step at a time, in plan order."""

    def __init__(
        self,
        loaded: LoadedModel,
        configure: link_pb2.Configure,
        num_chunks: int | None = None,
        sample: Sample | None = None,
        num_swap_chunks: int = 0,
    ) -> None:
        """By default memory.py chooses the pools' sizes and groups; with `num_chunks`, the two
        numbers are taken as given, and the groups of `loaded.geometry`. `sample` is
        worker.sampler's by default.

        Raises ValueError where the wanted attention or `deterministic` cannot be had, or where
        memory is too small.
        """
        if sample is None:
            from worker.sampler import sample as sample_tokens

            sample = sample_tokens
        self._sample = sample
        self._loaded = loaded
        self._model = loaded.model
        self._device = loaded.device
        needs_padding = configure.deterministic and not is_packed(loaded.model)
        self._row_multiple = _UNPACKED_ROWS if needs_padding else 1
        self.backend = choose_backend(
            configure.attention, loaded.device, loaded.dtype, configure.deterministic
        )
        if configure.deterministic:
            check_row_bits(loaded.model, self._row_multiple)
        self._geometry = loaded.geometry
        if num_chunks is None:
            memory = plan_memory(loaded, configure, self.backend.name)
            _logger.info("memory:\n%s", memory)
            self._geometry = memory.geometry
            num_chunks, num_swap_chunks = memory.num_chunks, memory.num_swap_chunks
        self.pool = KvPool(self._geometry, num_chunks, loaded.dtype, loaded.device)
        self.swap = SwapPool(self.pool, num_swap_chunks)
        groups = range(len(self._geometry.groups))
        self._num_blocks = [self.pool.num_blocks(group) for group in groups]
        self._num_swap_blocks = [self.swap.num_blocks(group) for group in groups]
        self._last_token = torch.zeros(_FIRST_ROWS, dtype=torch.int64, device=loaded.device)

    def step(self, plan: StepPlan) -> StepResult:
        """Run `plan` and wait for its result.

        Raises ValueError (InvalidPlan included) for a plan that contradicts itself or asks for
        what does not exist yet; then the KV of no block has changed.
        """
        _refuse_later_features(plan)
        inputs = prepare_inputs(
            plan,
            self._geometry.groups,
            self._num_blocks,
            self._geometry.page_size,
            num_swap_blocks=self._num_swap_blocks,
            row_multiple=self._row_multiple,
        )
        begin = time.perf_counter_ns()
        with torch.inference_mode():
            self._pre_ops(plan)
            if inputs.num_tokens == 0:  # a plan of pre-ops alone
                return _result(plan, _NOTHING, _NOTHING, _microseconds_since(begin))
            logits, finite_tokens = self._forward(inputs)
            token_ids = self._sample_rows(plan, logits)
            is_finite = _finite_rows(plan, inputs, logits, finite_tokens)
        # both results are on the host by now, so the device has finished
        return _result(plan, token_ids, is_finite, _microseconds_since(begin))

    def ready(self) -> link_pb2.Ready:
        """What the scheduler must know of this model and its pool."""
        geometry = self._geometry
        return link_pb2.Ready(
            model_path=self._loaded.model_path,
            model_type=self._loaded.model_type,
            architecture=self._loaded.architecture,
            vocab_size=self._loaded.vocab_size,
            max_model_len=self._loaded.max_model_len,
            dtype=str(self._loaded.dtype).removeprefix("torch."),
            device=str(self._device),
            groups=[
                link_pb2.CacheGroup(
                    kind=group.kind,
                    layers=group.layers,
                    sliding_window=group.sliding_window,
                    blocks_per_chunk=group.blocks_per_chunk,
                )
                for group in geometry.groups
            ],
            page_size=geometry.page_size,
            num_chunks=self.pool.num_chunks,
            chunk_bytes=geometry.chunk_bytes,
            num_swap_chunks=self.swap.num_chunks,
            attention=self.backend.name,
        )

    def _pre_ops(self, plan: StepPlan) -> None:
        self.swap.take_out(plan.swap_out)
        self.swap.bring_in(plan.swap_in)
        self.pool.copy_blocks(plan.copy)
        # samples may name rows that compute nothing yet: siblings that are forked off
        rows = (plan.rows, plan.init_rows, plan.sample_rows)
        highest = max(of_plan.max(initial=-1) for of_plan in rows)
        while highest >= len(self._last_token):
            self._last_token = torch.cat([self._last_token, torch.zeros_like(self._last_token)])
        if len(plan.init_rows):
            self._last_token[self._to_device(plan.init_rows.astype(np.int64))] = 0

    def _forward(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [L, V] of the plan's logits_indices, and which tokens are finite, bool [T]."""
        token_ids = self._to_device(inputs.token_ids.astype(np.int64))
        rows = self._to_device(inputs.token_rows.astype(np.int64))
        token_ids = torch.where(token_ids < 0, self._last_token[rows], token_ids)
        context = StepContext(
            backend=self.backend,
            pool=self.pool,
            query_start_loc=self._to_device(inputs.query_start_loc),
            seq_lens=self._to_device(inputs.seq_lens),
            groups=tuple(
                GroupTables(
                    table_start=self._to_device(group.table_start),
                    blocks=self._to_device(group.blocks),
                    first_positions=self._to_device(group.first_positions),
                    slot_mapping=self._to_device(group.slot_mapping),
                )
                for group in inputs.groups
            ),
            longest_query=int(np.diff(inputs.query_start_loc).max()),
            on_host=inputs,
        )
        self.backend.begin_step(context)
        with answering(context), _watching(self._model.base_model) as hidden:
            output = self._model(
                input_ids=token_ids[None],
                position_ids=self._to_device(inputs.positions.astype(np.int64))[None],
                use_cache=False,
                logits_to_keep=self._to_device(inputs.logits_indices.astype(np.int64)),
            )
        finite = torch.isfinite(hidden[0][0, : inputs.num_tokens]).all(dim=-1)
        return output.logits[0, : inputs.num_logits], finite

    def _sample_rows(self, plan: StepPlan, logits: torch.Tensor) -> Int32:
        """Sample, and remember each row's token for plans that do not know it yet."""
        if not len(plan.sample_logits):
            return _NOTHING
        if not np.array_equal(plan.sample_logits, np.arange(len(logits))):  # else spare the copy
            logits = logits[self._to_device(plan.sample_logits.astype(np.int64))]
        chosen = self._sample(
            logits.float(), plan.temperature, plan.top_k, plan.top_p, plan.min_p, plan.u
        )
        self._last_token[self._to_device(plan.sample_rows.astype(np.int64))] = chosen
        return chosen.to(torch.int32).cpu().numpy()

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        if not array.flags.writeable:  # a view into the received plan; torch wants its own
            array = array.copy()
        return torch.from_numpy(array).to(self._device)


@contextmanager
def _watching(base_model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Gives a list that the last hidden states [1, T, hidden] are put into, as they pass by."""
    seen: list[torch.Tensor] = []
    hook = base_model.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
    try:
        yield seen
    finally:
        hook.remove()


def _finite_rows(
    plan: StepPlan, inputs: StepInputs, logits: torch.Tensor, finite_tokens: torch.Tensor
) -> Int32:
    """[R] 1 where every token's last hidden state is finite, and the logits that were asked for
    have a finite maximum (some models give -inf to unused columns, so not all must be finite)."""
    finite = finite_tokens.cpu().numpy()
    if inputs.num_logits:
        finite = finite.copy()
        finite[plan.logits_indices] &= torch.isfinite(logits.amax(dim=-1)).cpu().numpy()
    return np.logical_and.reduceat(finite, plan.query_start_loc[:-1]).astype(np.int32)


def _microseconds_since(begin: int) -> int:
    return (time.perf_counter_ns() - begin) // 1000


def _refuse_later_features(plan: StepPlan) -> None:
    later = {
        "init_history (penalties)": len(plan.init_history),
        "repetition_penalty": np.count_nonzero(plan.repetition_penalty != 1),
        "frequency_penalty": np.count_nonzero(plan.frequency_penalty),
        "presence_penalty": np.count_nonzero(plan.presence_penalty),
        "logprobs": np.count_nonzero(plan.num_logprobs >= 0),
        "logit_bias": len(plan.bias_tokens),
        "scores (prompt_logprobs)": len(plan.score_logits),
        "a grammar mask": int(plan.awaits_mask),
    }
    for name, count in later.items():
        if count:
            raise ValueError(f"step {plan.step_id} asks for {name}, which this worker lacks so far")


def _result(
    plan: StepPlan, token_ids: Int32, is_finite: Int32, device_microseconds: int
) -> StepResult:
    samples = len(token_ids)
    return StepResult(
        step_id=plan.step_id,
        device_microseconds=device_microseconds,
        queue_microseconds=0,  # the loop knows when the plan came
        token_ids=token_ids,
        is_finite=is_finite,
        logprobs=np.zeros(samples, np.float32),
        ranks=np.zeros(samples, np.int32),
        top_start=np.zeros(samples + 1, np.int32),
        top_ids=np.zeros(0, np.int32),
        top_logprobs=np.zeros(0, np.float32),
    )
