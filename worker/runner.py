"""Runs steps: inputs to the device, pre-ops, one ragged forward, sampling, the result.

`launch` begins a step and returns; `Launched.wait` gives its result. On CUDA a step's copy in, its
computation and its copy out run in three lanes, and two sets of I/O buffers let the next step be
launched while one runs: the device need not wait for the host. A CPU takes the same path, and has
computed when `launch` returns.

Owns: the order of a step, the I/O sets, the last sampled token of every row. Does not own:
attention and KV memory (attention/, kv_pool.py), deriving inputs (inputs.py), the forward
(forward.py, graphs.py), choosing tokens (sampler.py), when a step runs (loop.py).

In deterministic mode a model with linear layers that are not packed gets its token rows and logits
rows padded to multiples of four; deterministic.py says why, and tries the model at hand.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Final

import numpy as np
import torch

from protos import link_pb2
from protos.plan import StepPlan, StepResult, empty_plan
from worker.attention import choose_backend
from worker.batch.inputs import StepInputs, prepare_inputs
from worker.batch.padding import PaddedShape, PaddedShapes, row_shape
from worker.batch.plan_values import PlanBounds, check_plan
from worker.cpu_layers.deterministic import RowBits, prove_row_bits
from worker.cpu_layers.packing import is_packed
from worker.kv.kv_pool import KvPool
from worker.kv.swap import SwapPool
from worker.memory.pool_size import plan_memory
from worker.model.capture_check import why_not_capturable
from worker.model.load import LoadedModel
from worker.process.device_failure import DeviceFailed
from worker.step.forward import Forward, Forwarded
from worker.step.graphs import StaticForward
from worker.step.io_buffers import Capacity, InputBuffer
from worker.step.lanes import Mark, new_lane, settle
from worker.step.output_buffer import OutputBuffer
from worker.step.pre_ops import MOST_IN_FLIGHT, PreOps
from worker.step.sampler import SampleRows, sample

Sample = Callable[[torch.Tensor, SampleRows], torch.Tensor]  # worker.sampler.sample
Progress = Callable[[str, float], None]

_logger = logging.getLogger(__name__)

_UNPACKED_ROWS: Final = 4  # deterministic token and logits rows come in multiples of this


class Runner:
    """One model with its KV pool. One thread launches, in plan order; another may wait."""

    def __init__(
        self,
        loaded: LoadedModel,
        configure: link_pb2.Configure,
        num_chunks: int | None = None,
        sample: Sample = sample,
        num_swap_chunks: int = 0,
        *,
        is_padded: bool | None = None,
        progress: Progress = lambda _what, _share: None,
    ) -> None:
        """By default memory.py chooses the pools' sizes and groups; with `num_chunks`, the two
        numbers are taken as given, and the groups of `loaded.geometry`.

        `is_padded` sends every step through static inputs of few shapes, as graphs need it; by
        default that is done where graphs can be captured.

        Raises ValueError where the wanted attention or `deterministic` cannot be had, or where
        memory is too small.
        """
        self._sample = sample
        self._loaded = loaded
        self._device = loaded.device
        needs_padding = configure.deterministic and not is_packed(loaded.model)
        self._row_multiple = _UNPACKED_ROWS if needs_padding else 1
        self.backend = choose_backend(
            configure.attention,
            loaded.device,
            loaded.dtype,
            loaded.geometry.head_dim,
            configure.deterministic,
        )
        if configure.deterministic:
            most_rows = configure.max_batch_tokens
            prove_row_bits(loaded.model, self._row_multiple, loaded.max_model_len, most_rows)
        self._row_bits = RowBits() if configure.deterministic else nullcontext()
        captures = _captures(loaded, configure, self.backend.name)
        self._geometry = loaded.geometry
        if num_chunks is None:
            memory = plan_memory(loaded, configure, self.backend.name)
            _logger.info("memory:\n%s", memory)
            self._geometry = memory.geometry
            num_chunks, num_swap_chunks = memory.num_chunks, memory.num_swap_chunks
        if loaded.kv_dtype != loaded.dtype:
            stored, computed = _name(loaded.kv_dtype), _name(loaded.dtype)
            _logger.info("keys and values are stored as %s, computed in %s", stored, computed)
        self.pool = KvPool(self._geometry, num_chunks, loaded.kv_dtype, loaded.device)
        self.swap = SwapPool(self.pool, num_swap_chunks)

        self._inbound, self._compute, self._outbound = (new_lane(self._device) for _ in range(3))
        self._pre_ops = PreOps(self.pool, self.swap, self._device)
        self._last_token = torch.zeros(
            configure.max_requests_per_batch, dtype=torch.int64, device=self._device
        )
        self._shapes = PaddedShapes(
            configure.max_batch_tokens,
            configure.max_requests_per_batch,
            configure.q_padding_interval_size or 8,
            self._row_multiple,
        )
        capacity = self._capacity()
        groups = range(capacity.groups)
        self._bounds = PlanBounds(
            groups=self._geometry.groups,
            page_size=self._geometry.page_size,
            num_blocks=[self.pool.num_blocks(group) for group in groups],
            num_swap_blocks=[self.swap.num_blocks(group) for group in groups],
            num_rows=len(self._last_token),
            num_embeddings=loaded.num_embeddings,
            max_tokens=self._shapes.most_tokens,
            max_blocks=capacity.blocks - capacity.groups * self._shapes.most_tokens,
        )
        self._sets = [_IoSet(capacity, self._device) for _ in range(MOST_IN_FLIGHT)]
        self._num_launched = 0
        self._forward = Forward(
            loaded.model, loaded.hidden_states, self.backend, self.pool, self._last_token
        )
        self._static: StaticForward | None = None
        if captures if is_padded is None else is_padded:
            static = InputBuffer(capacity, self._device)
            self._static = StaticForward(
                self._forward, static, self._shapes, self._write_padding, captures
            )
        settle(self._device)  # zeroing a pool takes longer than beginning a step
        if self._static is not None:
            with torch.inference_mode(), self._compute.use():
                self._static.capture_first_shapes(progress)

    def step(self, plan: StepPlan) -> StepResult:
        """Run `plan` and wait for its result; raises what `launch` raises."""
        return self.launch(plan).wait()

    def launch(self, plan: StepPlan) -> Launched:
        """Begin `plan`. With two steps launched, waits until the result of the older is taken.

        Raises InvalidPlan for a plan that contradicts itself or exceeds what this worker has; then
        the KV of no block has changed. Raises DeviceFailed where the device will do nothing more.
        """
        check_plan(plan, self._bounds)
        shape = self._shape_of(plan)
        inputs = prepare_inputs(plan, self._geometry.groups, self._geometry.page_size, shape)
        io = self._sets[self._num_launched % len(self._sets)]
        io.take()
        try:
            io.inputs.write(plan, inputs, self._loaded.vocab_size)
            with torch.inference_mode(), self._row_bits:
                launched = self._run(plan, inputs, shape, io)
        except BaseException as error:
            self._wait_until_idle(error)
            io.give_back()
            raise
        self._num_launched += 1
        return launched

    def _wait_until_idle(self, error: BaseException) -> None:
        """What was begun of a step that failed halfway still reads its inputs."""
        try:
            for lane in (self._inbound, self._compute):
                lane.mark().wait()
        except RuntimeError as broken:
            raise DeviceFailed(f"{type(error).__name__}: {error}") from broken

    def _run(self, plan: StepPlan, inputs: StepInputs, shape: PaddedShape, io: _IoSet) -> Launched:
        with self._inbound.use():
            io.inputs.to_device()
        self._compute.after(self._inbound.mark())
        begin = self._compute.mark()
        swapped_out = self._pre_ops.run(plan, inputs, self._compute)
        with self._compute.use():
            self._last_token.index_fill_(0, io.inputs.init_rows(), 0)
            io.outputs.clear()
            if inputs.num_tokens:  # else a plan of pre-ops alone
                forwarded = self._forward_of(io, inputs, shape)
                tokens = self._sample_rows(plan, io.inputs.samples(), forwarded.logits)
                io.outputs.write(
                    tokens,
                    forwarded.is_token_finite[: inputs.num_tokens],
                    forwarded.is_logits_finite[: inputs.num_logits],
                )
        end = self._compute.mark()
        self._outbound.after(end)
        if swapped_out is not None:
            self._outbound.after(swapped_out)
        with self._outbound.use():
            io.outputs.to_host()
        return Launched(plan, inputs, io, begin, end, self._outbound.mark())

    def _forward_of(self, io: _IoSet, inputs: StepInputs, shape: PaddedShape) -> Forwarded:
        if self._static is not None and shape.is_static:
            return self._static(io.inputs, inputs, shape)
        return self._forward(io.inputs.read(shape), shape.longest_query, inputs)

    def _sample_rows(
        self, plan: StepPlan, samples: SampleRows, logits: torch.Tensor
    ) -> torch.Tensor:
        """Tokens [S]; each row's last one is remembered for plans that do not know it yet."""
        count = len(samples.rows)
        if not count:
            return samples.rows
        # a sample of each row is the rule, and the rows need not be copied then
        in_order = np.array_equal(plan.sample_logits, np.arange(count))
        chosen = logits[:count] if in_order else logits[samples.logits]
        tokens = self._sample(chosen.float(), samples)
        is_last = np.append(plan.sample_rows[1:] != plan.sample_rows[:-1], True)  # of its row
        if is_last.all():
            self._last_token[samples.rows] = tokens
        else:
            last = torch.from_numpy(np.flatnonzero(is_last)).to(tokens.device)
            self._last_token[samples.rows[last]] = tokens[last]
        return tokens

    def _shape_of(self, plan: StepPlan) -> PaddedShape:
        longest = int(np.diff(plan.query_start_loc).max(initial=0))
        lengths = (len(plan.token_ids), len(plan.rows), len(plan.logits_indices), longest)
        static = self._shapes.shape_of(*lengths) if self._static is not None else None
        return static or row_shape(*lengths, self._row_multiple)

    def _capacity(self) -> Capacity:
        """Of the largest step: every request with as many tokens as there may be."""
        requests = self._shapes.most_requests + self._row_multiple
        pages = 0
        for group in self._geometry.groups:
            longest = self._loaded.max_model_len
            if group.sliding_window:
                most = group.sliding_window + MOST_IN_FLIGHT * self._shapes.max_batch_tokens
                longest = min(longest, most)
            pages += math.ceil(longest / self._geometry.page_size) + 1
        return Capacity(
            tokens=self._shapes.most_tokens,
            requests=requests,
            logits=self._shapes.most_tokens,
            samples=len(self._last_token),
            # padding: at most a page for each token
            blocks=requests * pages + len(self._geometry.groups) * self._shapes.most_tokens,
            groups=len(self._geometry.groups),
        )

    def _write_padding(self, shape: PaddedShape) -> None:
        assert self._static is not None
        groups = self._geometry.groups
        plan = empty_plan(len(groups))
        inputs = prepare_inputs(plan, groups, self._geometry.page_size, shape)
        self._static.static.write(plan, inputs, self._loaded.vocab_size)
        self._static.static.to_device()

    def ready(self) -> link_pb2.Ready:
        """What the scheduler must know of this model and its pool."""
        geometry, loaded = self._geometry, self._loaded
        return link_pb2.Ready(
            model_path=loaded.model_path,
            model_type=loaded.model_type,
            architecture=loaded.architecture,
            vocab_size=loaded.vocab_size,
            num_embeddings=loaded.num_embeddings,
            max_model_len=loaded.max_model_len,
            dtype=_name(loaded.dtype),
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
            graph_sizes=() if self._static is None else self._static.captured_sizes,
            attention=self.backend.name,
            overlaps_swap=self._device.type == "cuda",
            kv_cache_dtype=_name(loaded.kv_dtype),
        )


class _IoSet:
    """A step's inputs and outputs, from its launch until its result is read."""

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        self.inputs = InputBuffer(capacity, device)
        size = capacity.samples + capacity.tokens + capacity.logits
        self.outputs = OutputBuffer(size, device)
        self._is_free = threading.Semaphore()

    def take(self) -> None:
        self._is_free.acquire()

    def give_back(self) -> None:
        self._is_free.release()


class Launched:
    """A step that has begun."""

    def __init__(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        io: _IoSet,
        begin: Mark,
        end: Mark,
        is_out: Mark,
    ) -> None:
        self.step_id = plan.step_id
        self._plan = plan
        self._inputs = inputs
        self._io = io
        self._begin, self._end, self._is_out = begin, end, is_out

    def wait(self) -> StepResult:
        """Blocks until the step is done; once, and in the order of the launches."""
        plan = self._plan
        try:
            self._is_out.wait()
            microseconds = self._end.microseconds_since(self._begin)
            token_ids, is_token_finite, is_logits_finite = self._io.outputs.read()
        finally:
            self._io.give_back()
        is_token_finite[plan.logits_indices] &= is_logits_finite
        is_finite = np.empty(0, np.int32)
        if len(plan.rows):
            starts = plan.query_start_loc[:-1]
            is_finite = np.logical_and.reduceat(is_token_finite, starts).astype(np.int32)
        # the loop knows how long the plan was queued
        return StepResult(plan.step_id, microseconds, 0, token_ids, is_finite)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _captures(loaded: LoadedModel, configure: link_pb2.Configure, attention: str) -> bool:
    """Whether steps are captured as CUDA graphs; the log says why not."""
    if loaded.device.type != "cuda":
        return False
    obstacle: str | None = None
    if not configure.use_cuda_graph:
        obstacle = "use_cuda_graph is false"
    elif attention != "triton":
        obstacle = f"attention is {attention!r}, which loops over requests on the host"
    else:
        obstacle = why_not_capturable(loaded.model)
    if obstacle is not None:
        _logger.warning("steps run without CUDA graphs: %s", obstacle)
    return obstacle is None
