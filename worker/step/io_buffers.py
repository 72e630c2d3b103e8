"""A step's inputs at fixed addresses, in one buffer of bytes.

One copy brings all arrays of a step to the device. Each has a fixed place, sized for the largest
step; block tables come last, and only what is used of them is copied. What only some steps have,
and graphs do not read, follows in a second copy, in memory that grows (ragged_buffer.py). On the
CPU the host's buffer is the device's.

Owns: the layout, the buffer, writing a step into it. Does not own: when a buffer may be written
again (runner.py), outputs (output_buffer.py).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Annotated, Final, get_type_hints

import numpy as np
import torch

from protos.plan import StepPlan
from protos.sampling import SAMPLER_FIELDS
from worker.attention.interface import GroupTables
from worker.batch.inputs import StepInputs
from worker.batch.padding import PaddedShape
from worker.step.output_buffer import host_zeros
from worker.step.ragged_buffer import RaggedBuffer
from worker.step.sample_inputs import SampleInputs, StepSamples, prepare_samples
from worker.step.sampler import SampleRows

_ALIGNMENT: Final = 64  # bytes; more than any dtype needs, and what vector loads like


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest step, padding included. `blocks` counts the tables of all groups."""

    tokens: int
    requests: int
    logits: int
    samples: int
    blocks: int
    groups: int
    samples_at_once: int  # samples that are treated together


@dataclass(frozen=True, slots=True, eq=False)
class DeviceInputs:
    """What the forward reads, on the device, cut to a padded shape: dtypes and lengths."""

    token_ids: Annotated[torch.Tensor, "int64 tokens"]  # UNKNOWN_TOKEN: last sample of token_rows
    token_rows: Annotated[torch.Tensor, "int64 tokens"]
    positions: Annotated[torch.Tensor, "int64 tokens"]
    logits_indices: Annotated[torch.Tensor, "int64 logits"]
    query_start_loc: Annotated[torch.Tensor, "int32 requests+1"]
    seq_lens: Annotated[torch.Tensor, "int32 requests"]
    groups: tuple[GroupTables, ...]


# name → dtype and lengths, as attributes of Capacity
_HINTS: Final = get_type_hints(DeviceInputs, include_extras=True)
_FORWARD: Final = {n: hint.__metadata__[0] for n, hint in _HINTS.items() if n != "groups"}
_TABLES: Final = {
    "table_start": "int32 groups requests+1",
    "first_positions": "int32 groups requests",
    "slot_mapping": "int64 groups tokens",
}
_INDICES: Final = dict.fromkeys(("init_rows", "sample_logits", "sample_rows"), "int64 samples")
_SAMPLES: Final = _INDICES | {"u": "float32 samples"}
_PARAMETERS: Final = {name: f"{entry.dtype} samples" for name, entry in SAMPLER_FIELDS.items()}
_DERIVED: Final = {"sample_order": "int64 samples", "blocks": "int32 blocks"}
_LAYOUT: Final[dict[str, str]] = _FORWARD | _TABLES | _SAMPLES | _PARAMETERS | _DERIVED


class InputBuffer:
    """One set of inputs: `host` is written, `device` is what the device reads."""

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        sizes = asdict(capacity) | {"requests+1": capacity.requests + 1}
        places: dict[str, tuple[int, torch.dtype, list[int]]] = {}  # name → offset, dtype, shape
        num_bytes = 0
        for name, entry in _LAYOUT.items():
            kind, *lengths = entry.split()
            dtype, shape = getattr(torch, kind), [sizes[length] for length in lengths]
            places[name] = (num_bytes, dtype, shape)
            num_bytes += -(-dtype.itemsize * math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
        self.host = host_zeros(num_bytes, device)
        is_shared = device.type == "cpu"
        self.device = self.host if is_shared else torch.zeros_like(self.host, device=device)
        self.num_used = 0  # bytes of the step written last
        self.sampling = SampleInputs()  # of that step
        self._num_samples = self._num_init_rows = 0
        self._num_groups = capacity.groups
        self._samples_at_once = capacity.samples_at_once
        self._ragged = RaggedBuffer(device)
        self._blocks_offset = places["blocks"][0]
        self._arrays = {name: _view(self.host, *place).numpy() for name, place in places.items()}
        self._tensors = {name: _view(self.device, *place) for name, place in places.items()}

    def write(self, plan: StepPlan, inputs: StepInputs, vocab_size: int) -> None:
        """Writes a step that fits the capacity into the host's buffer."""
        self.sampling = prepare_samples(plan, vocab_size, self._samples_at_once)
        self._ragged.write(self.sampling.arrays)
        self._num_samples = len(plan.sample_rows)
        self._num_init_rows = len(plan.init_rows)
        blocks = inputs.groups[0].blocks  # of all groups
        self.num_used = self._blocks_offset + blocks.nbytes
        values = {name: getattr(inputs, name) for name in _FORWARD}
        values |= {name: getattr(plan, name) for name in _SAMPLES}
        values |= {**plan.sampling, "blocks": blocks}
        for name, array in values.items():
            self._arrays[name][: len(array)] = array
        if self.sampling.sample_order:
            order = self._arrays["sample_order"][: self._num_samples]
            np.concatenate(self.sampling.sample_order, out=order)
        for name in _TABLES:
            for index, group in enumerate(inputs.groups):
                array = getattr(group, name)
                self._arrays[name][index, : len(array)] = array

    def copy_from(self, other: torch.Tensor, num_bytes: int) -> None:
        """Fills the device's side with the first bytes of a buffer of the same layout."""
        self.device[:num_bytes].copy_(other[:num_bytes], non_blocking=True)

    def to_device(self) -> None:
        """Launches the copies; nothing where both sides are the same memory."""
        if self.device is not self.host:
            self.copy_from(self.host, self.num_used)
            self._ragged.to_device()

    def read(self, shape: PaddedShape) -> DeviceInputs:
        """The device's side as the forward wants it. Fixed addresses, whatever is written."""
        requests = shape.num_requests
        lengths = {"tokens": shape.num_tokens, "logits": shape.num_logits}
        lengths |= {"requests": requests, "requests+1": requests + 1}
        step = {
            name: self._tensors[name][..., : lengths[entry.split()[-1]]]
            for name, entry in (_FORWARD | _TABLES).items()
        }
        blocks = self._tensors["blocks"]
        groups = tuple(
            GroupTables(blocks=blocks, **{name: step[name][group] for name in _TABLES})
            for group in range(self._num_groups)
        )
        return DeviceInputs(groups=groups, **{name: step[name] for name in _FORWARD})

    def init_rows(self) -> torch.Tensor:
        """Rows that the written step gives to new tenants, on the device: int64 [I]."""
        return self._tensors["init_rows"][: self._num_init_rows]

    def samples(self) -> StepSamples:
        """The written step's samples, on the device."""
        count = self._num_samples
        order = self._tensors["sample_order"][:count]
        fixed = SampleRows(
            logits=self._tensors["sample_logits"][:count],
            rows=self._tensors["sample_rows"][:count],
            greedy=order,
            plain=order,
            truncated=order,
            u=self._tensors["u"][:count],
            parameters={name: self._tensors[name][:count] for name in _PARAMETERS},
        )
        return self.sampling.on_device(self._ragged.read(), fixed)


def _view(memory: torch.Tensor, start: int, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    end = start + dtype.itemsize * math.prod(shape)
    return memory[start:end].view(dtype).view(shape)
