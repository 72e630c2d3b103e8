"""A step from its launch until its result is read: its inputs and outputs, and the waiting.

Owns: which buffers a step has, and their way into a result. Does not own: what is launched in which
order (runner.py).
"""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from protos.plan import Int32, StepPlan, StepResult
from worker.batch.inputs import StepInputs
from worker.step.io_buffers import Capacity, InputBuffer
from worker.step.lanes import Mark
from worker.step.logits_edits import RowMasks
from worker.step.output_buffer import OutputBuffer
from worker.step.ragged_buffer import RaggedBuffer
from worker.step.sampling import SampleMasks


class IoSet:
    """A step's inputs and outputs, from its launch until its result is read."""

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        self.inputs = InputBuffer(capacity, device)
        self.outputs = OutputBuffer(capacity.samples + capacity.tokens + capacity.logits, device)
        self.mask_buffer = RaggedBuffer(device)
        self._masks: SampleMasks | None = None
        self._is_free = threading.Semaphore()

    def begin_outputs(self, inputs: StepInputs) -> None:
        """For the step whose inputs were written; it has no mask yet."""
        self._masks = None
        sampling = self.inputs.sampling
        size = inputs.num_tokens + inputs.num_logits + sum(map(len, sampling.sample_order))
        self.outputs.begin(size + sampling.num_answers + 2 * sampling.num_entries)

    def write_mask(self, samples: npt.NDArray[np.int64], words: Int32) -> None:
        """Into the host's memory; as check_mask returns it."""
        self._masks = SampleMasks(samples, words, self.inputs.sampling.ranges)
        self.mask_buffer.write(self._masks.arrays)

    def masks_on_device(self) -> list[RowMasks[torch.Tensor] | None]:
        """For each slice of samples, or none at all."""
        return [] if self._masks is None else self._masks.on_device(self.mask_buffer.read())

    def take(self) -> None:
        self._is_free.acquire()

    def give_back(self) -> None:
        self._is_free.release()


class RunningStep:
    """A step that was launched."""

    def __init__(
        self, plan: StepPlan, io: IoSet, spans: list[tuple[Mark, Mark]], is_out: Mark
    ) -> None:
        """`spans` in which the device computes, without the time it waits for a mask."""
        self._plan = plan
        self._io = io
        self._spans, self._is_out = spans, is_out
        self._order = io.inputs.sampling.answer_order

    def wait(self) -> StepResult:
        """Blocks until the step has finished; to be called once, in the order of the launches."""
        plan = self._plan
        try:
            self._is_out.wait()
            microseconds = sum(end.microseconds_since(begin) for begin, end in self._spans)
            parts = self._io.outputs.read()
        finally:
            self._io.give_back()
        token_ids = is_finite = np.empty(0, np.int32)
        if parts:
            token_ids, is_token_finite, is_logits_finite, *answers = parts
            is_token_finite[plan.logits_indices] &= is_logits_finite
            starts = plan.query_start_loc[:-1]
            is_finite = np.logical_and.reduceat(is_token_finite != 0, starts).astype(np.int32)
        # the loop knows how long the plan was queued
        result = StepResult(plan.step_id, microseconds, 0, token_ids, is_finite)
        if not parts or not answers:
            return result
        ranks, ids, logprobs = self._order.restore(*answers)
        return replace(result, ranks=ranks, candidate_ids=ids, logprobs=logprobs.view(np.float32))
