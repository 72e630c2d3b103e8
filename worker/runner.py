"""Runs steps: inputs to the device, pre-ops, one ragged forward, sampling, the result.

`launch` begins a step and returns; `RunningStep.wait` returns its result. On CUDA a step's copy in,
its computation and its copy out run in three lanes, and two sets of I/O buffers allow launching the
next step while one runs, so that the device never waits for the host. The CPU takes the same path;
there the step has finished when `launch` returns.

Owns: the order of operations in a step, the I/O sets, the last sampled token of every row. Does not
own: attention and KV memory (attention/, kv/), deriving inputs (batch/), the forward (step/),
sampling (step/sampler.py), when a step runs (process/loop.py).

In deterministic mode, a model with unpacked linear layers gets its token and logits rows padded to
multiples of four; cpu_layers/deterministic.py says why, and proves that it suffices.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Final

import numpy as np
import torch

from protos import link_pb2
from protos.plan import StepPlan, empty_plan
from protos.sampling import MAX_LOGPROBS
from worker.attention.backends import choose_backend
from worker.batch.inputs import StepInputs, prepare_inputs
from worker.batch.mask_values import check_mask
from worker.batch.padding import PaddedShape, PaddedShapes, row_shape
from worker.batch.plan_values import InvalidPlan, PlanBounds, check_plan
from worker.cpu_layers.deterministic import RowBits, prove_row_bits
from worker.cpu_layers.packing import is_packed
from worker.kv.kv_pool import KvPool
from worker.kv.swap import SwapPool
from worker.memory.pool_size import plan_memory
from worker.memory.step_memory import most_logits, samples_at_once
from worker.model.capture_check import why_not_capturable
from worker.model.load import LoadedModel
from worker.process.device_failure import DeviceFailed
from worker.process.progress import Progress
from worker.step.candidates import joined
from worker.step.forward import Forward, Forwarded
from worker.step.graphs import StaticForward
from worker.step.io_buffers import Capacity, InputBuffer
from worker.step.lanes import new_lane, settle
from worker.step.pre_ops import MOST_IN_FLIGHT, PreOps
from worker.step.running_step import IoSet, RunningStep
from worker.step.sampler import sample
from worker.step.sampling import Sample, sample_step

MaskSource = Callable[[], link_pb2.Mask]  # waits for the mask of the plan being launched

logger = logging.getLogger(__name__)

_UNPACKED_ROWS: Final = 4  # deterministic, unpacked: rows come in multiples of this
_MOST_ENTRIES: Final = 2**22  # of candidates in a result, unless max_logits needs more


class Runner:
    """One model with its KV pool. One thread launches, in plan order; another one may wait.

    `sample` chooses the tokens and may be replaced."""

    def __init__(
        self,
        loaded: LoadedModel,
        configure: link_pb2.Configure,
        num_chunks: int | None = None,
        num_swap_chunks: int = 0,
        progress: Progress = lambda _what, _share: None,
    ) -> None:
        """pool_size.py chooses the sizes of the pools and the cache groups, unless `num_chunks` is
        given: then both numbers hold as given, with the groups of `loaded.geometry`.

        Raises ValueError where the requested attention or `deterministic` is not available, or
        where memory is too small.
        """
        self.sample: Sample = sample
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
            logger.info("memory:\n%s", memory)
            self._geometry = memory.geometry
            num_chunks, num_swap_chunks = memory.num_chunks, memory.num_swap_chunks
        if loaded.kv_dtype != loaded.dtype:
            stored, computed = _name(loaded.kv_dtype), _name(loaded.dtype)
            logger.info("keys and values are stored as %s, computed in %s", stored, computed)
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
        self._max_logits = most_logits(loaded.vocab_size, configure, loaded.device)
        capacity = self._capacity()
        groups = range(capacity.groups)
        self._bounds = PlanBounds(
            groups=self._geometry.groups,
            page_size=self._geometry.page_size,
            num_blocks=[self.pool.num_blocks(group) for group in groups],
            num_swap_blocks=[self.swap.num_blocks(group) for group in groups],
            num_rows=len(self._last_token),
            num_embeddings=loaded.num_embeddings,
            vocab_size=loaded.vocab_size,
            max_tokens=self._shapes.most_tokens,
            max_logits=self._max_logits,
            max_blocks=capacity.blocks - capacity.groups * self._shapes.most_tokens,
            max_entries=max(_MOST_ENTRIES, 2 * self._max_logits * (1 + MAX_LOGPROBS)),
        )
        self._sets = [IoSet(capacity, self._device) for _ in range(MOST_IN_FLIGHT)]
        self._num_launched = 0
        self._forward = Forward(
            loaded.model, loaded.hidden_states, self.backend, self.pool, self._last_token
        )
        self._static: StaticForward | None = None
        if captures:
            self.use_static_inputs(captures)
        settle(self._device)  # zeroing a pool takes longer than launching a step
        if self._static is not None:
            with torch.inference_mode(), self._compute.use():
                self._static.capture_first_shapes(progress)

    def use_static_inputs(self, captures: bool) -> None:
        """Sends all steps through static inputs of few shapes, as graphs need it; `captures`:
        whether there is a device to capture graphs on. Called before the first step."""
        static = InputBuffer(self._capacity(), self._device)
        self._static = StaticForward(
            self._forward, static, self._shapes, self._write_padding, captures
        )

    def launch(self, plan: StepPlan, mask_of: MaskSource | None = None) -> RunningStep:
        """Launches `plan`. With two steps in flight, waits until the older one's result is read. A
        plan that awaits a mask gets it from `mask_of`, called once its forward is launched.

        Raises InvalidPlan for a plan that contradicts itself or exceeds what this worker has; then
        no block's KV has changed; also for a mask that does not fit the plan. Raises DeviceFailed
        where the device cannot run another step, and what `mask_of` raises.
        """
        check_plan(plan, self._bounds)
        if plan.awaits_mask and mask_of is None:
            raise InvalidPlan(f"step {plan.step_id} awaits a mask, and none can come")
        shape = self._shape_of(plan)
        inputs = prepare_inputs(plan, self._geometry.groups, self._geometry.page_size, shape)
        io = self._sets[self._num_launched % len(self._sets)]
        io.take()
        try:
            io.inputs.write(plan, inputs, self._loaded.vocab_size)
            with torch.inference_mode(), self._row_bits:
                launched = self._run(plan, inputs, shape, io, mask_of)
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

    def _run(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        shape: PaddedShape,
        io: IoSet,
        mask_of: MaskSource | None,
    ) -> RunningStep:
        with self._inbound.use():
            io.inputs.to_device()
        self._compute.after(self._inbound.mark())
        begin = self._compute.mark()
        swapped_out = self._pre_ops.run(plan, inputs, self._compute)
        with self._compute.use():
            self._last_token.index_fill_(0, io.inputs.init_rows(), 0)
            io.begin_outputs(inputs)
            if inputs.num_tokens:  # else a plan of pre-ops alone
                forwarded = self._forward_of(io, inputs, shape)
        spans = []
        if plan.awaits_mask and mask_of is not None:
            spans.append((begin, self._compute.mark()))
            self._take_mask(plan, io, mask_of())
            begin = self._compute.mark()
        with self._compute.use():
            if inputs.num_tokens:
                samples, masks = io.inputs.samples(), io.masks_on_device()
                tokens, answers = sample_step(
                    forwarded.logits, samples, masks, self._last_token, self.sample
                )
                is_token_finite = forwarded.is_token_finite[: inputs.num_tokens]
                is_logits_finite = forwarded.is_logits_finite[: inputs.num_logits]
                io.outputs.write([tokens, is_token_finite, is_logits_finite, *joined(answers)])
        end = self._compute.mark()
        self._outbound.after(end)
        if swapped_out is not None:
            self._outbound.after(swapped_out)
        with self._outbound.use():
            io.outputs.to_host()
        return RunningStep(plan, io, [*spans, (begin, end)], self._outbound.mark())

    def _forward_of(self, io: IoSet, inputs: StepInputs, shape: PaddedShape) -> Forwarded:
        if self._static is not None and shape.is_static:
            return self._static(io.inputs, inputs, shape)
        return self._forward(io.inputs.read(shape), shape.longest_query, inputs)

    def _take_mask(self, plan: StepPlan, io: IoSet, mask: link_pb2.Mask) -> None:
        io.write_mask(*check_mask(mask, plan, self._loaded.vocab_size))
        with self._inbound.use():
            io.mask_buffer.to_device()
        self._compute.after(self._inbound.mark())

    def _shape_of(self, plan: StepPlan) -> PaddedShape:
        longest = int(np.diff(plan.query_start_loc).max(initial=0))
        lengths = (len(plan.token_ids), len(plan.rows), len(plan.logits_indices), longest)
        static = self._shapes.shape_of(*lengths) if self._static is not None else None
        return static or row_shape(*lengths, self._row_multiple)

    def _capacity(self) -> Capacity:
        """Lengths of the largest step: every request at max_model_len."""
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
            samples=max(len(self._last_token), self._max_logits),
            # padding: at most a page for each token
            blocks=requests * pages + len(self._geometry.groups) * self._shapes.most_tokens,
            groups=len(self._geometry.groups),
            samples_at_once=samples_at_once(self._loaded.vocab_size, len(self._last_token)),
        )

    def _write_padding(self, shape: PaddedShape) -> None:
        assert self._static is not None
        groups = self._geometry.groups
        plan = empty_plan(len(groups))
        inputs = prepare_inputs(plan, groups, self._geometry.page_size, shape)
        self._static.static.write(plan, inputs, self._loaded.vocab_size)
        self._static.static.to_device()

    def ready(self) -> link_pb2.Ready:
        """What the scheduler must know about this model and its pools."""
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
            max_logits=self._max_logits,
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _captures(loaded: LoadedModel, configure: link_pb2.Configure, attention: str) -> bool:
    """Whether steps are captured as CUDA graphs; logs why not."""
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
        logger.warning("steps run without CUDA graphs: %s", obstacle)
    return obstacle is None
