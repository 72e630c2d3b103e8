"""What a plan asks for before its forward: blocks out to the swap pool, blocks in, copies.

In line, plan order makes every re-use of a block safe. On a device, swaps run in a lane of their
own. Copies out begin when all earlier steps are through, and run beside this step's forward, which
waits for them only if it writes where they read. Copies in begin at once, unless the step before
may still use that memory, and the forward waits for them. The scheduler keeps swapped-out blocks
reserved until the plan's result is back (Ready.overlaps_swap), so that in practice nothing waits;
but being right does not rest on that.

Steps are compared by chunk: the unit of memory that cache groups share.

Owns: the order of these copies and the steps. Does not own: the copies (swap.py, kv_pool.py).
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from protos.plan import Int32, StepPlan
from worker.batch.inputs import StepInputs
from worker.kv.kv_pool import KvPool
from worker.kv.swap import SwapPool
from worker.step.lanes import Lane, Mark, new_lane

_Chunks = npt.NDArray[np.int32]

MOST_IN_FLIGHT: Final = 2  # steps; what is older has finished when a step begins


class PreOps:
    """Called once per step, in plan order, with the lane that the step's forward will use."""

    def __init__(self, pool: KvPool, swap: SwapPool, device: torch.device) -> None:
        self._pool = pool
        self._swap = swap
        self._lane = new_lane(device)
        self._blocks_per_chunk = np.array(
            [group.blocks_per_chunk for group in pool.geometry.groups], np.int32
        )
        self._before: tuple[StepPlan, StepInputs] | None = None  # the step before
        # copies out that may still run, and what they read
        self._outs: deque[tuple[Mark, _Chunks] | None] = deque(maxlen=MOST_IN_FLIGHT)

    def run(self, plan: StepPlan, inputs: StepInputs, compute: Lane) -> Mark | None:
        """Begins the copies; the forward may follow in `compute`. The mark is passed when this
        plan's copies out are done, which its result must not overtake; None without any."""
        self._outs.append(self._take_out(plan, compute) if len(plan.swap_out) else None)
        if any(self._outs):
            written = self._written(plan, inputs)
            for out in self._outs:
                if out is not None and np.isin(out[1], written).any():
                    compute.after(out[0])
        if len(plan.swap_in):
            self._bring_in(plan, compute)
        if len(plan.copy):
            with compute.use():
                self._pool.copy_blocks(plan.copy)
        self._before = (plan, inputs)
        own = self._outs[-1]
        return None if own is None else own[0]

    def _take_out(self, plan: StepPlan, compute: Lane) -> tuple[Mark, _Chunks]:
        self._lane.after(compute.mark())  # earlier steps have written what is copied
        with self._lane.use():
            self._swap.take_out(plan.swap_out)
        return self._lane.mark(), self._chunks(plan.swap_out, 1)

    def _bring_in(self, plan: StepPlan, compute: Lane) -> None:
        # one lane for both ways: what went out before has arrived in the swap pool by now
        if self._before is not None:
            used = self._used(*self._before)
            if np.isin(self._chunks(plan.swap_in, 2), used).any():
                self._lane.after(compute.mark())
        with self._lane.use():
            self._swap.bring_in(plan.swap_in)
        compute.after(self._lane.mark())

    def _written(self, plan: StepPlan, inputs: StepInputs) -> _Chunks:
        """Where the step stores keys and values; copies in have a lane with the copies out."""
        slots_per_chunk = self._blocks_per_chunk * self._pool.geometry.page_size
        stored = [
            np.unique(group.slot_mapping // slots).astype(np.int32)
            for group, slots in zip(inputs.groups, slots_per_chunk.tolist(), strict=True)
        ]
        return np.concatenate([*stored, self._chunks(plan.copy, 2)])

    def _used(self, plan: StepPlan, inputs: StepInputs) -> _Chunks:
        """What the step reads or writes."""
        named = [
            group.blocks[group.table_start[0] : group.table_start[-1]] // per_chunk
            for group, per_chunk in zip(inputs.groups, self._blocks_per_chunk.tolist(), strict=True)
        ]
        return np.concatenate([*named, self._chunks(plan.copy, 1), self._chunks(plan.copy, 2)])

    def _chunks(self, triples: Int32, column: int) -> _Chunks:
        """Of the blocks in a column of [P, 3] (group, ., .)."""
        chunks: _Chunks = triples[:, column] // self._blocks_per_chunk[triples[:, 0]]
        return chunks
