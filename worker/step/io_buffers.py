"""A step's inputs and outputs at fixed addresses: one buffer of bytes each way.

All arrays of a step lie in one buffer, so that one copy brings them to the device. Each has a
fixed place, sized for the largest step; block tables come last, so that a copy ends with what is
used of them. On the CPU the host's buffer is the device's.

Owns: the layout, the buffers, writing a step into them. Does not own: when a buffer may be
written again (runner.py).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from protos.plan import StepPlan
from worker.attention.interface import GroupTables
from worker.batch.inputs import InvalidPlan, StepInputs
from worker.batch.padding import PaddedShape
from worker.step.sampler import SampleRows, split_rows

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


@dataclass(frozen=True, slots=True, eq=False)
class DeviceInputs:
    """What the forward reads, on the device, cut to a shape of T tokens, R requests, L logits."""

    token_ids: torch.Tensor  # int64 [T] UNKNOWN_TOKEN = the last sampled token of token_rows
    token_rows: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    logits_indices: torch.Tensor  # int64 [L]
    query_start_loc: torch.Tensor  # int32 [R+1]
    seq_lens: torch.Tensor  # int32 [R]
    groups: tuple[GroupTables, ...]


class InputBuffer:
    """One set of inputs. `host` is what is written, `device` what the device reads."""

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        self.capacity = capacity
        self._places: dict[str, tuple[int, np.dtype[Any], tuple[int, ...]]] = {}
        offset = 0
        for name, dtype, shape in _layout(capacity):
            self._places[name] = (offset, np.dtype(dtype), shape)
            size = np.dtype(dtype).itemsize * int(np.prod(shape))
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        if device.type == "cuda":
            self.host = torch.zeros(offset, dtype=torch.uint8, pin_memory=True)
        else:
            # numpy's zeros are given by the system page by page, on first use
            self.host = torch.from_numpy(np.zeros(offset, np.uint8))
        is_shared = device.type == "cpu"
        self.device = self.host if is_shared else torch.zeros_like(self.host, device=device)
        self.num_used = 0  # bytes, of the step that was written last
        self._arrays = {
            name: _view(self.host, *place).numpy() for name, place in self._places.items()
        }
        self._tensors = {name: _view(self.device, *place) for name, place in self._places.items()}

    def write(self, plan: StepPlan, inputs: StepInputs, vocab_size: int) -> None:
        """Put a step into the host's buffer. Raises InvalidPlan for one that is too large."""
        self._check(plan, inputs)
        for name in ("token_ids", "token_rows", "positions", "logits_indices"):
            self._put(name, getattr(inputs, name))
        self._put("query_start_loc", inputs.query_start_loc)
        self._put("seq_lens", inputs.seq_lens)
        offset = 0
        for index, group in enumerate(inputs.groups):
            self._put(("table_start", index), group.table_start + np.int32(offset))
            self._put(("first_positions", index), group.first_positions)
            self._put(("slot_mapping", index), group.slot_mapping)
            self._arrays["blocks"][offset : offset + len(group.blocks)] = group.blocks
            offset += len(group.blocks)
        for name in ("init_rows", "sample_logits", "sample_rows", *_PARAMETERS):
            self._put(name, getattr(plan, name))
        split = split_rows(plan.temperature, plan.top_k, plan.top_p, plan.min_p, vocab_size)
        self._put("sample_order", np.concatenate(split))
        self._num_each = [len(rows) for rows in split]
        self._num_init_rows = len(plan.init_rows)
        self.num_used = self._places["blocks"][0] + 4 * offset

    def copy_from(self, other: torch.Tensor, num_bytes: int) -> None:
        """Fill the device's side with the first bytes of a buffer of the same layout."""
        self.device[:num_bytes].copy_(other[:num_bytes], non_blocking=True)

    def to_device(self) -> None:
        """The one copy of a step; nothing where both sides are the same memory."""
        if self.device is not self.host:
            self.copy_from(self.host, self.num_used)

    def read(self, shape: PaddedShape) -> DeviceInputs:
        """The device's side as the forward wants it. Fixed addresses, whatever is written."""
        tensors = self._tensors
        tokens, requests = shape.num_tokens, shape.num_requests
        return DeviceInputs(
            token_ids=tensors["token_ids"][:tokens],
            token_rows=tensors["token_rows"][:tokens],
            positions=tensors["positions"][:tokens],
            logits_indices=tensors["logits_indices"][: shape.num_logits],
            query_start_loc=tensors["query_start_loc"][: requests + 1],
            seq_lens=tensors["seq_lens"][:requests],
            groups=tuple(
                GroupTables(
                    table_start=tensors["table_start"][group, : requests + 1],
                    blocks=tensors["blocks"],
                    first_positions=tensors["first_positions"][group, :requests],
                    slot_mapping=tensors["slot_mapping"][group, :tokens],
                )
                for group in range(self.capacity.groups)
            ),
        )

    def init_rows(self) -> torch.Tensor:
        """Rows that the written step gives to new tenants, on the device: int64 [I]."""
        return self._tensors["init_rows"][: self._num_init_rows]

    def samples(self) -> SampleRows:
        """The written step's samples, on the device."""
        count = sum(self._num_each)
        greedy, plain, truncated = self._tensors["sample_order"][:count].split(self._num_each)
        return SampleRows(
            logits=self._tensors["sample_logits"][:count],
            rows=self._tensors["sample_rows"][:count],
            greedy=greedy,
            plain=plain,
            truncated=truncated,
            **{name: self._tensors[name][:count] for name in _PARAMETERS},
        )

    def _put(self, place: str | tuple[str, int], values: npt.NDArray[Any]) -> None:
        name, index = place if isinstance(place, tuple) else (place, None)
        array = self._arrays[name] if index is None else self._arrays[name][index]
        array[: len(values)] = values

    def _check(self, plan: StepPlan, inputs: StepInputs) -> None:
        needed = Capacity(
            tokens=len(inputs.token_ids),
            requests=len(inputs.seq_lens),
            logits=len(inputs.logits_indices),
            samples=max(len(plan.sample_rows), len(plan.init_rows)),
            blocks=sum(len(group.blocks) for group in inputs.groups),
            groups=len(inputs.groups),
        )
        for field in fields(Capacity):
            wanted, limit = getattr(needed, field.name), getattr(self.capacity, field.name)
            if wanted > limit:
                raise InvalidPlan(
                    f"the plan has {wanted} {field.name}, padding included; this worker was "
                    f"configured for at most {limit}"
                )


class OutputBuffer:
    """One set of outputs: sampled tokens [S], finite tokens [T], finite logits rows [L]."""

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        size = capacity.samples + capacity.tokens + capacity.logits
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda)
        self._device = (
            self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)
        )
        self._is_cuda = is_cuda
        self._lengths: list[int] = [0, 0, 0]

    def clear(self) -> None:
        self._lengths = [0, 0, 0]

    def write(self, tokens: torch.Tensor, finite: torch.Tensor, logits: torch.Tensor) -> None:
        """Keep a step's results on the device, one behind the other."""
        parts = (tokens, finite, logits)
        self._lengths = [len(part) for part in parts]
        count = sum(self._lengths)
        for part, place in zip(parts, self._device[:count].split(self._lengths), strict=True):
            place.copy_(part)

    def to_host(self) -> None:
        if self._device is not self._host:
            count = sum(self._lengths)
            self._host[:count].copy_(self._device[:count], non_blocking=self._is_cuda)

    def read(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Copies of the three, from the host's side."""
        count = sum(self._lengths)
        array = self._host[:count].numpy().copy()
        tokens, finite, logits = np.split(array, np.cumsum(self._lengths)[:-1])
        return tokens, finite.astype(np.bool_), logits.astype(np.bool_)


_PARAMETERS: Final = ("temperature", "top_k", "top_p", "min_p", "u")


def _layout(capacity: Capacity) -> list[tuple[str, type[np.generic], tuple[int, ...]]]:
    tokens, requests, samples = capacity.tokens, capacity.requests, capacity.samples
    return [
        ("token_ids", np.int64, (tokens,)),
        ("token_rows", np.int64, (tokens,)),
        ("positions", np.int64, (tokens,)),
        ("slot_mapping", np.int64, (capacity.groups, tokens)),
        ("logits_indices", np.int64, (capacity.logits,)),
        ("query_start_loc", np.int32, (requests + 1,)),
        ("seq_lens", np.int32, (requests,)),
        ("table_start", np.int32, (capacity.groups, requests + 1)),
        ("first_positions", np.int32, (capacity.groups, requests)),
        ("init_rows", np.int64, (samples,)),
        ("sample_logits", np.int64, (samples,)),
        ("sample_rows", np.int64, (samples,)),
        ("sample_order", np.int64, (samples,)),
        ("temperature", np.float32, (samples,)),
        ("top_k", np.int32, (samples,)),
        ("top_p", np.float32, (samples,)),
        ("min_p", np.float32, (samples,)),
        ("u", np.float32, (samples,)),
        ("blocks", np.int32, (capacity.blocks,)),
    ]


def _view(
    memory: torch.Tensor, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> torch.Tensor:
    size = dtype.itemsize * int(np.prod(shape))
    torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
    return memory[offset : offset + size].view(torch_dtype).view(shape)
