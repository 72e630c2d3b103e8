"""A small, explicit planner: makes StepPlans for given chunks, without any scheduling.

Blocks come from a shuffled free list, so that tables are scattered and a kernel that reads
neighbouring blocks instead of its table is found out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from protos.plan import NUM_RESERVED_CHUNKS, PLAN_LAYOUT, UNKNOWN_TOKEN, StepPlan, StepResult
from worker.runner import Runner


def plan_of(step_id: int = 1, **arrays: Any) -> StepPlan:
    """A plan of one cache group with the given arrays; the others are empty or off."""
    samples = len(arrays.get("sample_logits", ()))
    values: dict[str, Any] = {
        "swap_out": np.zeros((0, 2)),
        "swap_in": np.zeros((0, 2)),
        "copy": np.zeros((0, 3)),
        "init_history_start": np.zeros(len(arrays.get("init_rows", ())) + 1),
        "query_start_loc": [0],
        "bias_start": np.zeros(samples + 1),
        "temperature": np.zeros(samples),
        "top_k": np.zeros(samples),
        "top_p": np.ones(samples),
        "min_p": np.zeros(samples),
        "u": np.zeros(samples),
        "repetition_penalty": np.ones(samples),
        "frequency_penalty": np.zeros(samples),
        "presence_penalty": np.zeros(samples),
        "num_logprobs": np.full(samples, -1),
        "table_start": np.zeros((1, len(arrays.get("rows", ())) + 1)),
        "first_positions": np.zeros((1, len(arrays.get("rows", ())))),
        **arrays,
    }
    return StepPlan(
        step_id=step_id,
        awaits_mask=values.pop("awaits_mask", False),
        **{name: np.asarray(values.get(name, []), dtype) for name, dtype, _ in PLAN_LAYOUT},
    )


@dataclass(slots=True, eq=False)
class Request:
    prompt: list[int]
    max_tokens: int
    row: int
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    table: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


@dataclass(slots=True, eq=False)
class Planner:
    """Block tables of a few requests, and the plans for chosen chunks of them."""

    page_size: int
    num_blocks: int  # of the pool, with the reserved ones
    seed: int = 0
    hide_outputs: bool = False  # plan sampled tokens as UNKNOWN_TOKEN, as run-ahead does
    step_id: int = 0
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.free = list(range(NUM_RESERVED_CHUNKS, self.num_blocks))
        random.Random(self.seed).shuffle(self.free)

    def plan(self, chunks: Sequence[tuple[Request, int]]) -> StepPlan:
        """One step that computes so many next tokens of each request, and samples where that
        reaches the last one known."""
        self.step_id += 1
        tokens: list[int] = []
        query_start_loc, table_start = [0], [0]
        blocks: list[int] = []
        sampling, logits_indices = [], []
        for request, length in chunks:
            known = [*request.prompt, *request.output]
            begin, end = request.num_computed, request.num_computed + length
            assert length > 0
            assert end <= len(known)
            for position in range(begin, end):
                is_hidden = self.hide_outputs and position >= len(request.prompt)
                tokens.append(UNKNOWN_TOKEN if is_hidden else known[position])
            while len(request.table) * self.page_size < end:
                request.table.append(self.free.pop())
            query_start_loc.append(len(tokens))
            blocks += request.table
            table_start.append(len(blocks))
            request.num_computed = end
            if end == len(known):
                sampling.append(request.row)
                logits_indices.append(len(tokens) - 1)
        return plan_of(
            self.step_id,
            init_rows=[r.row for r, length in chunks if r.num_computed == length],
            init_prompt_lens=[len(r.prompt) for r, length in chunks if r.num_computed == length],
            token_ids=tokens,
            rows=[request.row for request, _ in chunks],
            query_start_loc=query_start_loc,
            seq_lens=[request.num_computed for request, _ in chunks],
            table_start=[table_start],
            blocks=blocks,
            logits_indices=logits_indices,
            sample_logits=range(len(logits_indices)),
            sample_rows=sampling,
        )

    def finish(self, request: Request) -> None:
        self.free += request.table
        request.table = []


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
        result = runner.step(plan)
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
