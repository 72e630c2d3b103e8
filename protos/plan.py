"""The array layout of a step plan and of its result: the one thing both processes must agree on.

A plan travels as two frames: a small protobuf header (`link_pb2.StepPlan`), which gives the length
of every variable dimension, and one buffer with all arrays back to back in the order declared
here, each of 4-byte items, so that a device takes the whole plan in one copy. `decode_*` returns
views into the buffer, without copying.

Dimensions of a plan:

    T tokens of the step             O, N, C  swap-out, swap-in and copy pairs
    R rows (requests) of the step    I, J     row_init records, and their history tokens
    L tokens whose logits are needed G, B     cache groups, and block table entries of all groups
    S samples                        X        logit-bias entries (bans are bias -inf)
    K scores (prompt_logprobs)

Owns: names, order, dtypes and shapes. Does not own: what the numbers mean for scheduling
(scheduler_svc/core/pack.py writes them) or for attention (worker/batch/inputs.py reads them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

UNKNOWN_TOKEN: Final = -1  # this row's last sampled token, still on the device
NUM_RESERVED_CHUNKS: Final = 2
PADDING_READ_CHUNK: Final = 0  # its blocks are what padding reads: always zero
PADDING_WRITE_CHUNK: Final = 1  # its blocks take the writes of padding


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step, as the worker gets it. Arrays are C-contiguous; int32 unless said.

    Before the forward, in this order: swap_out, swap_in, copy, row_init. Block numbers count
    within their cache group: block b of a group lies in chunk b // blocks_per_chunk, and likewise
    for swap blocks and swap chunks.
    """

    step_id: int
    awaits_mask: bool  # a link Mask with this step_id follows; wait for it before sampling

    swap_out: Int32  # [O, 3] (group, block, swap block)
    swap_in: Int32  # [N, 3] (group, swap block, block)
    copy: Int32  # [C, 3] (group, from block, to block)
    init_rows: Int32  # [I] rows that a new request takes over in this step
    init_prompt_lens: Int32  # [I] length of its original prompt: what follows is output
    init_history_start: Int32  # [I+1] into init_history
    init_history: Int32  # [J] known tokens of rows whose penalties need them; empty otherwise

    token_ids: Int32  # [T] UNKNOWN_TOKEN = the row's last sampled token, still on the device
    rows: Int32  # [R]
    query_start_loc: Int32  # [R+1] into token_ids
    seq_lens: Int32  # [R] tokens of the request after this step: query t has position
    #                     seq_lens[r] - (query_start_loc[r+1] - query_start_loc[r]) + t
    table_start: Int32  # [G, R+1] into blocks; group g's tables follow those of g-1
    first_positions: Int32  # [G, R] token position at which the table starts
    blocks: Int32  # [B]

    logits_indices: Int32  # [L] into token_ids
    sample_logits: Int32  # [S] into logits_indices
    sample_rows: Int32  # [S] the row each sample belongs to
    temperature: Float32  # [S] 0 = greedy
    top_k: Int32  # [S] 0 = off
    top_p: Float32  # [S] 1 = off
    min_p: Float32  # [S] 0 = off
    u: Float32  # [S] uniform in [0, 1): k / 2^24
    repetition_penalty: Float32  # [S] 1 = off
    frequency_penalty: Float32  # [S] 0 = off
    presence_penalty: Float32  # [S] 0 = off
    num_logprobs: Int32  # [S] -1 = none wanted, 0 = the chosen token's only
    bias_start: Int32  # [S+1] into bias_tokens
    bias_tokens: Int32  # [X]
    bias_values: Float32  # [X]
    score_logits: Int32  # [K] into logits_indices
    score_targets: Int32  # [K] the token whose logprob is wanted there
    score_num_logprobs: Int32  # [K]


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What came of a plan. Q = S + K: samples first, then scores; Y candidates of all of them."""

    step_id: int
    device_microseconds: int
    queue_microseconds: int

    token_ids: Int32  # [S]
    is_finite: Int32  # [R] 0 = a hidden state of this row was not finite
    logprobs: Float32  # [Q] of the sampled or scored token; 0 where none was wanted
    ranks: Int32  # [Q] 1 = most probable; 0 where none was wanted
    top_start: Int32  # [Q+1] into top_ids
    top_ids: Int32  # [Y]
    top_logprobs: Float32  # [Y]


_Shape = tuple[str | int, ...]

PLAN_DIMENSIONS: Final = ("O", "N", "C", "I", "J", "T", "R", "G", "B", "L", "S", "X", "K")
PLAN_LAYOUT: Final[tuple[tuple[str, type[np.generic], _Shape], ...]] = (
    ("swap_out", np.int32, ("O", 3)),
    ("swap_in", np.int32, ("N", 3)),
    ("copy", np.int32, ("C", 3)),
    ("init_rows", np.int32, ("I",)),
    ("init_prompt_lens", np.int32, ("I",)),
    ("init_history_start", np.int32, ("I+1",)),
    ("init_history", np.int32, ("J",)),
    ("token_ids", np.int32, ("T",)),
    ("rows", np.int32, ("R",)),
    ("query_start_loc", np.int32, ("R+1",)),
    ("seq_lens", np.int32, ("R",)),
    ("table_start", np.int32, ("G", "R+1")),
    ("first_positions", np.int32, ("G", "R")),
    ("blocks", np.int32, ("B",)),
    ("logits_indices", np.int32, ("L",)),
    ("sample_logits", np.int32, ("S",)),
    ("sample_rows", np.int32, ("S",)),
    ("temperature", np.float32, ("S",)),
    ("top_k", np.int32, ("S",)),
    ("top_p", np.float32, ("S",)),
    ("min_p", np.float32, ("S",)),
    ("u", np.float32, ("S",)),
    ("repetition_penalty", np.float32, ("S",)),
    ("frequency_penalty", np.float32, ("S",)),
    ("presence_penalty", np.float32, ("S",)),
    ("num_logprobs", np.int32, ("S",)),
    ("bias_start", np.int32, ("S+1",)),
    ("bias_tokens", np.int32, ("X",)),
    ("bias_values", np.float32, ("X",)),
    ("score_logits", np.int32, ("K",)),
    ("score_targets", np.int32, ("K",)),
    ("score_num_logprobs", np.int32, ("K",)),
)

RESULT_DIMENSIONS: Final = ("S", "R", "Q", "Y")
RESULT_LAYOUT: Final[tuple[tuple[str, type[np.generic], _Shape], ...]] = (
    ("token_ids", np.int32, ("S",)),
    ("is_finite", np.int32, ("R",)),
    ("logprobs", np.float32, ("Q",)),
    ("ranks", np.int32, ("Q",)),
    ("top_start", np.int32, ("Q+1",)),
    ("top_ids", np.int32, ("Y",)),
    ("top_logprobs", np.float32, ("Y",)),
)

_Layout = tuple[tuple[str, type[np.generic], _Shape], ...]


class LayoutError(ValueError):
    """Counts and buffer do not fit the layout: the other side speaks another version."""


def empty_plan(num_groups: int) -> StepPlan:
    """A plan, step 0, that asks for nothing."""
    sizes = dict.fromkeys(PLAN_DIMENSIONS, 0) | {"G": num_groups}
    arrays = {name: np.zeros(_lengths(shape, sizes), dtype) for name, dtype, shape in PLAN_LAYOUT}
    return StepPlan(step_id=0, awaits_mask=False, **arrays)


def encode_plan(plan: StepPlan) -> tuple[list[int], bytes]:
    """The header's counts and the buffer of `plan`."""
    return _encode(plan, PLAN_LAYOUT, PLAN_DIMENSIONS)


def decode_plan(
    step_id: int, awaits_mask: bool, counts: Sequence[int], buffer: bytes | memoryview
) -> StepPlan:
    """The plan that `encode_plan` flattened, as read-only views into `buffer`."""
    arrays = _decode(counts, buffer, PLAN_LAYOUT, PLAN_DIMENSIONS)
    return StepPlan(step_id=step_id, awaits_mask=awaits_mask, **arrays)


def encode_result(result: StepResult) -> tuple[list[int], bytes]:
    """The header's counts and the buffer of `result`."""
    return _encode(result, RESULT_LAYOUT, RESULT_DIMENSIONS)


def decode_result(
    step_id: int,
    device_microseconds: int,
    queue_microseconds: int,
    counts: Sequence[int],
    buffer: bytes | memoryview,
) -> StepResult:
    """The result that `encode_result` flattened, as read-only views into `buffer`."""
    arrays = _decode(counts, buffer, RESULT_LAYOUT, RESULT_DIMENSIONS)
    return StepResult(
        step_id=step_id,
        device_microseconds=device_microseconds,
        queue_microseconds=queue_microseconds,
        **arrays,
    )


def _encode(
    value: StepPlan | StepResult, layout: _Layout, dimensions: tuple[str, ...]
) -> tuple[list[int], bytes]:
    sizes: dict[str, int] = {}
    parts: list[bytes] = []
    for name, dtype, shape in layout:
        array = getattr(value, name)
        if array.dtype != dtype or array.ndim != len(shape):
            raise LayoutError(
                f"{name} is {array.dtype}{list(array.shape)}; the layout wants "
                f"{np.dtype(dtype)}{list(shape)}"
            )
        for wanted, length in zip(shape, array.shape, strict=True):
            symbol, extra = _dimension(wanted)
            if sizes.setdefault(symbol, length - extra) != length - extra:
                raise LayoutError(f"{name} has {length} where {wanted} is {sizes[symbol] + extra}")
        parts.append(array.tobytes())
    return [sizes[symbol] for symbol in dimensions], b"".join(parts)


def _decode(
    counts: Sequence[int],
    buffer: bytes | memoryview,
    layout: _Layout,
    dimensions: tuple[str, ...],
) -> dict[str, Any]:
    if len(counts) != len(dimensions) or min(counts, default=0) < 0:
        raise LayoutError(f"counts are {list(counts)}; wanted {len(dimensions)}: {dimensions}")
    sizes = dict(zip(dimensions, counts, strict=True))
    arrays: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape in layout:
        lengths = _lengths(shape, sizes)
        size = math.prod(lengths)
        if offset + 4 * size > len(buffer):
            raise LayoutError(f"the buffer of {len(buffer)} bytes ends inside {name}")
        arrays[name] = np.frombuffer(buffer, dtype, size, offset).reshape(lengths)
        offset += 4 * size
    if offset != len(buffer):
        raise LayoutError(f"the buffer has {len(buffer)} bytes; the counts give {offset}")
    return arrays


def _lengths(shape: _Shape, sizes: dict[str, int]) -> list[int]:
    """The numbers that a layout's shape stands for."""
    parsed = (_dimension(wanted) for wanted in shape)
    return [extra + (sizes[symbol] if symbol else 0) for symbol, extra in parsed]


def _dimension(wanted: str | int) -> tuple[str, int]:
    """("R", 1) for "R+1", ("", 2) for the constant 2."""
    if isinstance(wanted, int):
        return "", wanted
    return _PARSED[wanted]


_PARSED: Final = {
    wanted: (wanted.partition("+")[0], int(wanted.partition("+")[2] or 0))
    for layout in (PLAN_LAYOUT, RESULT_LAYOUT)
    for _, _, shape in layout
    for wanted in shape
    if isinstance(wanted, str)
}


def _names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


assert [name for name, _, _ in PLAN_LAYOUT] == _names(StepPlan)[2:]
assert [name for name, _, _ in RESULT_LAYOUT] == _names(StepResult)[3:]
