"""The layout of a step plan and of its result: the arrays both processes agree on.

Either travels as two frames: a small protobuf header (`link_pb2.StepPlan`), which gives the length
of every variable dimension, and one buffer of all arrays back to back, in the order declared here,
of 4-byte items. `decode_*` returns read-only views into that buffer.

The buffer is not what the device reads: the worker pads a plan, derives positions and slots, and
writes all of it to fixed addresses (worker/step/io_buffers.py). Block tables keep one form from
here to the kernels: offsets into one array of blocks, and token positions, not pages.

    T tokens of the step             O, N, C  swap-out, swap-in and copy pairs
    R rows (requests) of the step    I        rows with a new tenant
    L tokens whose logits are used   G, B     cache groups; block table entries of all groups
    S samples: 0, 1 or several of each row   H, A  history and bias entries of all samples
    Q prompt tokens to score                 K, E  of a result: ranks, and candidates

Owns: names, order, dtypes and shapes. Does not own: what the numbers mean for scheduling
(scheduler_svc/core/pack.py), or whether they can be executed (worker/batch/plan_values.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from protos.sampling import SAMPLER_FIELDS

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
_DTYPES: Final = {Int32: np.int32, Float32: np.float32}
Arrays = Mapping[str, npt.NDArray[Any]]
# name, dtype and shape of each array; a dimension is a symbol, "symbol+1", or a constant
Layout = tuple[tuple[str, type[np.generic], tuple[str | int, ...]], ...]

UNKNOWN_TOKEN: Final = -1  # stands for the row's last sampled token, which only the device has
ANY_TOKEN: Final = -1  # a bias that does not depend on the row's last sampled token
NO_CANDIDATES: Final = -1  # a sample whose log probability is not asked for
NUM_RESERVED_CHUNKS: Final = 2
PADDING_READ_CHUNK: Final = 0  # padding reads its blocks: always zero
PADDING_WRITE_CHUNK: Final = 1  # padding writes to its blocks


class LayoutError(ValueError):
    """Counts, arrays or buffer do not fit the layout; perhaps the peer has another version."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step, as the worker receives it. Arrays are C-contiguous.

    Before the forward, in this order: swap_out, swap_in, copy, init_rows. Block numbers count
    within their cache group: block b of a group lies in chunk b // blocks_per_chunk, and likewise
    for swap blocks and swap chunks.
    """

    step_id: int
    awaits_mask: bool  # a link Mask with this step_id follows; wait for it before sampling

    swap_out: Annotated[Int32, "O", 3]  # (group, block, swap block)
    swap_in: Annotated[Int32, "N", 3]  # (group, swap block, block)
    copy: Annotated[Int32, "C", 3]  # (group, from block, to block)
    init_rows: Annotated[Int32, "I"]  # rows that get a new tenant in this step

    token_ids: Annotated[Int32, "T"]  # or UNKNOWN_TOKEN
    rows: Annotated[Int32, "R"]
    query_start_loc: Annotated[Int32, "R+1"]  # into token_ids
    seq_lens: Annotated[Int32, "R"]  # tokens of the request after this step: its query ends there
    table_start: Annotated[Int32, "G", "R+1"]  # into blocks; group g's tables follow those of g-1
    first_positions: Annotated[Int32, "G", "R"]  # of the token that begins the table's first page
    blocks: Annotated[Int32, "B"]

    logits_indices: Annotated[Int32, "L"]  # into token_ids
    sample_logits: Annotated[Int32, "S"]  # into logits_indices
    sample_rows: Annotated[Int32, "S"]  # the row of each sample; those of one row are neighbours
    u: Annotated[Float32, "S"]  # uniform in [0, 1): k / 2^24
    sampling: Arrays  # [S] for each of SAMPLER_FIELDS

    # Log probabilities. A sample or score with k candidates is answered by k + 1 entries, its own
    # token first, then the k most probable ones; samples first, then scores. Raw ones, of the
    # model's logits; of a beam: those that penalties and biases have changed.
    num_candidates: Annotated[Int32, "S"]  # k, or NO_CANDIDATES
    is_beam: Annotated[Int32, "S"]  # 1 = no token is chosen; candidates of the changed logprobs
    score_logits: Annotated[Int32, "Q"]  # into logits_indices
    score_tokens: Annotated[Int32, "Q"]  # the prompt's next token, whose log probability is asked
    score_candidates: Annotated[Int32, "Q"]  # k, at least 0

    # Context of the samples that have penalties: distinct tokens before the sampled one, with how
    # often each was generated (0: in the prompt only). UNKNOWN_TOKEN may come in addition to all.
    history_start: Annotated[Int32, "S+1"]  # into the two below
    history_tokens: Annotated[Int32, "H"]
    history_counts: Annotated[Int32, "H"]

    # What is added to logits of a sample: logit_bias, and -inf for bans (min_tokens, bad_words).
    bias_start: Annotated[Int32, "S+1"]  # into the three below
    bias_tokens: Annotated[Int32, "A"]
    bias_after: Annotated[Int32, "A"]  # only if the row sampled this token last; or ANY_TOKEN
    bias: Annotated[Float32, "A"]

    @classmethod
    def from_arrays(cls, step_id: int, awaits_mask: bool, arrays: Arrays) -> StepPlan:
        """A plan of the arrays that PLAN_LAYOUT names."""
        own = {name: array for name, array in arrays.items() if name not in SAMPLER_FIELDS}
        sampling = {name: arrays[name] for name in SAMPLER_FIELDS}
        return cls(step_id=step_id, awaits_mask=awaits_mask, sampling=sampling, **own)


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What the worker answers to a plan."""

    step_id: int
    device_microseconds: int
    queue_microseconds: int

    token_ids: Annotated[Int32, "S"]
    is_finite: Annotated[Int32, "R"]  # 0 = a hidden state of this row was not finite
    # of the samples that ask for candidates, then of the scores: see StepPlan
    ranks: Annotated[Int32, "K"] = field(default_factory=lambda: np.zeros(0, np.int32))  # from 1
    candidate_ids: Annotated[Int32, "E"] = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: Annotated[Float32, "E"] = field(default_factory=lambda: np.zeros(0, np.float32))


def _layout(kind: type[StepPlan | StepResult]) -> Layout:
    """The annotated attributes of a message."""
    hints = get_type_hints(kind, include_extras=True).items()
    annotated = [(name, hint) for name, hint in hints if get_origin(hint) is Annotated]
    return tuple((name, _DTYPES[hint.__origin__], hint.__metadata__) for name, hint in annotated)


def _dimensions(layout: Layout) -> tuple[str, ...]:
    """Symbols of a layout, in order of appearance: the header's counts."""
    lengths = (str(length) for _, _, shape in layout for length in shape)
    return tuple(dict.fromkeys(length for length in lengths if length.isalpha()))


RESULT_LAYOUT: Final = _layout(StepResult)
RESULT_DIMENSIONS: Final = _dimensions(RESULT_LAYOUT)
PLAN_LAYOUT: Final = _layout(StepPlan) + tuple(
    (name, np.dtype(entry.dtype).type, ("S",)) for name, entry in SAMPLER_FIELDS.items()
)
PLAN_DIMENSIONS: Final = _dimensions(PLAN_LAYOUT)


def empty_plan(num_groups: int) -> StepPlan:
    """A plan, step 0, of a step that does nothing."""
    counts = [num_groups if symbol == "G" else 0 for symbol in PLAN_DIMENSIONS]
    shapes = _shapes(counts, PLAN_LAYOUT, PLAN_DIMENSIONS)
    arrays = {name: np.zeros(shapes[name], dtype) for name, dtype, _ in PLAN_LAYOUT}
    return StepPlan.from_arrays(0, False, arrays)


def encode_plan(plan: StepPlan) -> tuple[list[int], bytes]:
    """The header's counts and the buffer of `plan`. Raises LayoutError."""
    own = {name: getattr(plan, name) for name, _, _ in PLAN_LAYOUT if name not in SAMPLER_FIELDS}
    return _encode(own | dict(plan.sampling), PLAN_LAYOUT, PLAN_DIMENSIONS)


def decode_plan(
    step_id: int, awaits_mask: bool, counts: Sequence[int], buffer: bytes | memoryview
) -> StepPlan:
    """The plan that `encode_plan` flattened. Raises LayoutError."""
    arrays = _decode(counts, buffer, PLAN_LAYOUT, PLAN_DIMENSIONS)
    return StepPlan.from_arrays(step_id, awaits_mask, arrays)


def encode_result(result: StepResult) -> tuple[list[int], bytes]:
    """The header's counts and the buffer of `result`. Raises LayoutError."""
    arrays = {name: getattr(result, name) for name, _, _ in RESULT_LAYOUT}
    return _encode(arrays, RESULT_LAYOUT, RESULT_DIMENSIONS)


def decode_result(
    step_id: int, device_us: int, queue_us: int, counts: Sequence[int], buffer: bytes | memoryview
) -> StepResult:
    """The result that `encode_result` flattened. Raises LayoutError."""
    arrays = _decode(counts, buffer, RESULT_LAYOUT, RESULT_DIMENSIONS)
    return StepResult(step_id, device_us, queue_us, **arrays)


def _shapes(
    counts: Sequence[int], layout: Layout, dimensions: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    """The shape of each array, of the numbers that its symbols stand for."""
    if len(counts) != len(dimensions) or min(counts) < 0:
        raise LayoutError(f"counts are {list(counts)}; allowed: one, from 0, for each {dimensions}")
    sizes: dict[str | int, int] = dict(zip(dimensions, counts, strict=True))
    sizes |= {f"{symbol}+1": size + 1 for symbol, size in sizes.items()} | {3: 3}
    return {name: tuple(sizes[length] for length in shape) for name, _, shape in layout}


def _encode(arrays: Arrays, layout: Layout, dimensions: tuple[str, ...]) -> tuple[list[int], bytes]:
    sizes: dict[str | int, int] = {}  # of each dimension where it appears first
    for name, _, shape in reversed(layout):
        sizes |= zip(shape, arrays[name].shape, strict=False)
    counts = [sizes.get(symbol, 0) for symbol in dimensions]
    shapes = _shapes(counts, layout, dimensions)
    for name, dtype, _ in layout:
        found, wanted = (arrays[name].dtype, arrays[name].shape), (np.dtype(dtype), shapes[name])
        if found != wanted:
            raise LayoutError(f"{name} is {found[0]}{found[1]}; allowed: {wanted[0]}{wanted[1]}")
    return counts, b"".join(arrays[name].tobytes() for name, _, _ in layout)


def _decode(
    counts: Sequence[int], buffer: bytes | memoryview, layout: Layout, dimensions: tuple[str, ...]
) -> dict[str, npt.NDArray[Any]]:
    shapes = _shapes(counts, layout, dimensions)
    num_bytes = 4 * sum(map(math.prod, shapes.values()))
    if num_bytes != len(buffer):
        raise LayoutError(f"the buffer has {len(buffer)} bytes; the counts give {num_bytes}")
    arrays, offset = {}, 0
    for name, dtype, _ in layout:
        size = math.prod(shapes[name])
        arrays[name] = np.frombuffer(buffer, dtype, size, offset).reshape(shapes[name])
        offset += 4 * size
    return arrays
