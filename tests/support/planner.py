"""A small, explicit planner: makes StepPlans for given chunks, without any scheduling.

Chunks are dealt out to the cache groups once, and each group's blocks come from a shuffled free
list, so that tables are scattered and a kernel that reads neighbouring blocks instead of its table
is found out. Sliding tables let go of what the window no longer reads, and such blocks are used
again at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from protos.plan import NUM_RESERVED_CHUNKS, PLAN_LAYOUT, UNKNOWN_TOKEN, StepPlan, StepResult
from protos.sampling import SAMPLER_FIELDS
from worker.kv.geometry import CacheGeometry, CacheGroup
from worker.runner import Runner


def plan_of(step_id: int = 1, **arrays: Any) -> StepPlan:
    """A plan with the given arrays, of one cache group unless `table_start` has more; the others
    are empty or off."""
    samples = len(arrays.get("sample_logits", ()))
    values: dict[str, Any] = {
        "swap_out": np.zeros((0, 3)),
        "swap_in": np.zeros((0, 3)),
        "copy": np.zeros((0, 3)),
        "query_start_loc": [0],
        "u": np.zeros(samples),
        **{name: np.full(samples, entry.neutral) for name, entry in SAMPLER_FIELDS.items()},
        "temperature": np.zeros(samples),
        "table_start": np.zeros((1, len(arrays.get("rows", ())) + 1)),
        "first_positions": np.zeros((1, len(arrays.get("rows", ())))),
        **arrays,
    }
    filled = {name: np.asarray(values.get(name, []), dtype) for name, dtype, _ in PLAN_LAYOUT}
    return StepPlan.from_arrays(step_id, False, filled)


@dataclass(slots=True, eq=False)
class Table:
    """One request's blocks of one cache group, from page `first_page` on."""

    first_page: int = 0
    blocks: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Request:
    prompt: list[int]
    max_tokens: int
    row: int
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    tables: list[Table] = field(default_factory=list)  # one per cache group

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def table(self) -> list[int]:
        """The blocks of the first cache group."""
        return self.tables[0].blocks


@dataclass(slots=True, eq=False)
class Planner:
    """Block tables of a few requests, and the plans for chosen chunks of them."""

    geometry: CacheGeometry
    num_chunks: int  # of the pool, with the reserved ones
    seed: int = 0
    hide_outputs: bool = False  # plan sampled tokens as UNKNOWN_TOKEN, as run-ahead does
    step_id: int = 0
    free_blocks: list[list[int]] = field(init=False)  # per cache group

    def __post_init__(self) -> None:
        groups = self.geometry.groups
        self.free_blocks = []
        for index, group in enumerate(groups):
            chunks = range(NUM_RESERVED_CHUNKS + index, self.num_chunks, len(groups))
            size = group.blocks_per_chunk
            blocks = [block for c in chunks for block in range(c * size, (c + 1) * size)]
            random.Random(self.seed + index).shuffle(blocks)
            self.free_blocks.append(blocks)

    @property
    def free(self) -> list[int]:
        """Free blocks of the first cache group."""
        return self.free_blocks[0]

    def plan(self, chunks: Sequence[tuple[Request, int]], **arrays: Any) -> StepPlan:
        """One step that computes so many next tokens of each request, and samples where that
        reaches the last one known. `arrays` replace those of the plan."""
        self.step_id += 1
        tokens: list[int] = []
        query_start_loc = [0]
        sampling, logits_indices = [], []
        for request, length in chunks:
            known = [*request.prompt, *request.output]
            begin, end = request.num_computed, request.num_computed + length
            assert length > 0
            assert end <= len(known)
            for position in range(begin, end):
                is_hidden = self.hide_outputs and position >= len(request.prompt)
                tokens.append(UNKNOWN_TOKEN if is_hidden else known[position])
            self._cover(request, begin, end)
            query_start_loc.append(len(tokens))
            request.num_computed = end
            if end == len(known):
                sampling.append(request.row)
                logits_indices.append(len(tokens) - 1)
        requests = [request for request, _ in chunks]
        new = [request for request, length in chunks if request.num_computed == length]
        values = {
            "init_rows": [request.row for request in new],
            "token_ids": tokens,
            "rows": [request.row for request in requests],
            "query_start_loc": query_start_loc,
            "seq_lens": [request.num_computed for request in requests],
            "logits_indices": logits_indices,
            "sample_logits": range(len(logits_indices)),
            "sample_rows": sampling,
            **self._tables(requests),
            **arrays,
        }
        return plan_of(self.step_id, **values)

    def _cover(self, request: Request, begin: int, end: int) -> None:
        """Blocks for positions below `end`, and none that only tokens before `begin` read."""
        if not request.tables:
            request.tables = [Table() for _ in self.geometry.groups]
        for index, (group, table) in enumerate(
            zip(self.geometry.groups, request.tables, strict=True)
        ):
            first_page = self._first_page(group, begin)
            leaving = first_page - table.first_page
            self.free_blocks[index] += table.blocks[:leaving]
            del table.blocks[:leaving]
            table.first_page = first_page
            while (table.first_page + len(table.blocks)) * self.geometry.page_size < end:
                table.blocks.append(self.free_blocks[index].pop())

    def _first_page(self, group: CacheGroup, begin: int) -> int:
        if not group.sliding_window:
            return 0
        return max(0, begin - group.sliding_window + 1) // self.geometry.page_size

    def _tables(self, requests: Sequence[Request]) -> dict[str, Any]:
        starts, first_positions, blocks = [], [], []
        for index in range(len(self.geometry.groups)):
            tables = [request.tables[index] for request in requests]
            starts.append([len(blocks)])
            for table in tables:
                blocks += table.blocks
                starts[-1].append(len(blocks))
            first_positions.append([t.first_page * self.geometry.page_size for t in tables])
        return {"table_start": starts, "first_positions": first_positions, "blocks": blocks}

    def finish(self, request: Request) -> None:
        for free, table in zip(self.free_blocks, request.tables, strict=True):
            free += table.blocks
            table.blocks = []


class GreedySample:
    """Stands in for the sampler: argmax, and it keeps the logits [S, V] of every call."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []

    def __call__(self, logits: torch.Tensor, *_: object) -> torch.Tensor:
        self.logits.append(logits.clone())
        return logits.argmax(dim=-1)


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    logits: torch.Tensor  # [tokens, V] that they were sampled from


def serve(
    runner: Runner,
    planner: Planner,
    sample: GreedySample,
    prompts: Sequence[list[int]],
    max_tokens: Sequence[int],
    *,
    chunk: int = 1000,
    stagger: int = 0,
) -> list[Answer]:
    """Serve prompts in mixed steps: request i arrives at step i * stagger, each step computes at
    most `chunk` tokens of a request. Requests that are done leave; their blocks are used again."""
    requests = [
        Request(prompt, count, row=3 * index + 1)
        for index, (prompt, count) in enumerate(zip(prompts, max_tokens, strict=True))
    ]
    logits: dict[int, list[torch.Tensor]] = {request.row: [] for request in requests}
    step = 0
    while True:
        active = [r for i, r in enumerate(requests) if step >= i * stagger and not _done(r)]
        if not active and all(_done(r) for r in requests):
            break
        step += 1
        if not active:
            continue
        if step % 2:  # the order within a batch must not matter
            active.reverse()
        plan = planner.plan([(r, min(chunk, r.num_tokens - r.num_computed)) for r in active])
        result = runner.launch(plan).wait()
        check_result(plan, result)
        by_row = {request.row: request for request in active}
        for index, row in enumerate(plan.sample_rows.tolist()):
            by_row[row].output.append(int(result.token_ids[index]))
            logits[row].append(sample.logits[-1][index])
            if _done(by_row[row]):
                planner.finish(by_row[row])
    return [Answer(request.output, torch.stack(logits[request.row])) for request in requests]


def check_result(plan: StepPlan, result: StepResult) -> None:
    assert result.step_id == plan.step_id
    assert len(result.token_ids) == len(plan.sample_logits)
    assert result.is_finite.tolist() == [1] * len(plan.rows)


def _done(request: Request) -> bool:
    return len(request.output) >= request.max_tokens
