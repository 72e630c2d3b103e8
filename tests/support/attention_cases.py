"""Cases for attention backends: random K and V in a pool, and the answer in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from worker.attention.interface import AttentionCall, GroupTables, StepContext
from worker.batch.inputs import GroupInputs, StepInputs
from worker.kv.geometry import FULL_ATTENTION, CacheGeometry, CacheGroup
from worker.kv.kv_pool import KvPool

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float64: 1e-12}
CALLS = {
    "plain": {},
    "window": {"sliding_window": 9},
    "window over key blocks": {"sliding_window": 100},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 33, "softcap": 5.0, "sinks": True},
}


def layer_module(index: int) -> nn.Module:
    """Stands for the attention module of a layer."""
    module = nn.Module()
    module.layer_idx = index
    return module


def copied(pool: KvPool, dtype: torch.dtype, device: torch.device = CPU) -> KvPool:
    """The same keys and values, in another dtype or on another device."""
    geometry = replace(pool.geometry, itemsize=dtype.itemsize)
    copy = KvPool(geometry, pool.num_chunks, dtype, device)
    copy.memory.copy_(pool.memory)
    return copy


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    query: torch.Tensor  # [T, H, D]
    key: torch.Tensor  # [T, Hkv, D] of the query's tokens: written by the step itself
    value: torch.Tensor
    keys: list[torch.Tensor]  # per request [L, Hkv, D], rounded to what the pool holds
    values: list[torch.Tensor]
    context: StepContext
    call: AttentionCall

    @property
    def pages(self) -> torch.Tensor:
        """Of the layer that attends."""
        return self.context.pool.layer_views(self.call.layer)[1]

    def to(self, device: torch.device) -> Case:
        """The same on another device; only `keys` and `values` stay, and no copy on the host."""
        pool = copied(self.context.pool, self.context.pool.memory.dtype, device)

        def moved(value: Any, names: Iterable[str]) -> Any:
            return replace(value, **{name: getattr(value, name).to(device) for name in names})

        tables = tuple(moved(group, GroupTables.__slots__) for group in self.context.groups)
        context = moved(self.context, ("query_start_loc", "seq_lens"))
        call = self.call if self.call.sinks is None else moved(self.call, ("sinks",))
        return replace(
            moved(self, ("query", "key", "value")),
            context=replace(context, pool=pool, groups=tables, on_host=None),
            call=call,
        )

    def alone(self, request: int) -> Case:
        """One of the requests in a step of its own, over the same pages."""
        starts, tables = self.context.query_start_loc.tolist(), self.context.groups[0]
        tokens = slice(starts[request], starts[request + 1])
        entries = slice(*tables.table_start[request : request + 2].tolist())
        one = slice(request, request + 1)

        def up_to(count: int) -> torch.Tensor:
            return torch.tensor([0, count], dtype=torch.int32, device=self.pages.device)

        return replace(
            self,
            query=self.query[tokens],
            key=self.key[tokens],
            value=self.value[tokens],
            context=replace(
                self.context,
                query_start_loc=up_to(tokens.stop - tokens.start),
                seq_lens=self.context.seq_lens[one],
                groups=(
                    GroupTables(
                        table_start=up_to(entries.stop - entries.start),
                        blocks=tables.blocks[entries],
                        first_positions=tables.first_positions[one],
                        slot_mapping=tables.slot_mapping[tokens],
                    ),
                ),
                longest_query=tokens.stop - tokens.start,
                on_host=None,
            ),
        )


def make_case(
    shapes: Sequence[tuple[int, int]],
    grouped: int,
    head_dim: int,
    dtype: torch.dtype,
    page_size: int = 8,
    window_tables: bool = False,
    kv_dtype: torch.dtype | None = None,
    **call: object,
) -> Case:
    """Random K and V, written block by block in scattered order; what no request owns is NaN, so
    that a read beside the tables shows. With window_tables, tables start where the window does.
    The pool holds kv_dtype, by default dtype."""
    kv_dtype = kv_dtype or dtype
    generator = torch.Generator().manual_seed(1)
    num_kv_heads, num_heads = 2, 2 * grouped

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    window = int(call.get("sliding_window", 0))
    first_positions = [
        max(0, length - q - window + 1) // page_size * page_size if window_tables else 0
        for q, length in shapes
    ]
    num_pages = [
        math.ceil((length - first) / page_size)
        for (_, length), first in zip(shapes, first_positions, strict=True)
    ]
    group = CacheGroup(FULL_ATTENTION, (0, 1), 0, 1)
    geometry = CacheGeometry(
        (group,), 2, num_heads, num_kv_heads, head_dim, page_size, itemsize=kv_dtype.itemsize
    )
    pool = KvPool(geometry, 2 + sum(num_pages), kv_dtype, CPU)
    pool.blocks(0).fill_(math.nan)
    _, pages = pool.layer_views(1)
    order = (2 + torch.randperm(sum(num_pages), generator=generator)).tolist()
    keys, values, new, tables, slots = [], [], [], [], []
    for (q, length), first, count in zip(shapes, first_positions, num_pages, strict=True):
        table, order = order[:count], order[count:]
        k, v = draw(length, num_kv_heads, head_dim), draw(length, num_kv_heads, head_dim)
        for position in range(first, length):
            block, place = table[(position - first) // page_size], position % page_size
            if position >= length - q:
                slots.append(block * page_size + place)
                continue
            pages[block, 0, :, place] = k[position]
            pages[block, 1, :, place] = v[position]
        keys.append(k.to(kv_dtype))
        values.append(v.to(kv_dtype))
        new.append((k[length - q :], v[length - q :]))
        tables.append(table)
    query_start_loc = np.cumsum([0, *(q for q, _ in shapes)], dtype=np.int32)
    table_start = np.cumsum([0, *num_pages], dtype=np.int32)
    on_host = StepInputs(
        num_tokens=int(query_start_loc[-1]),
        num_requests=len(shapes),
        num_logits=0,
        token_ids=np.zeros(0, np.int32),
        token_rows=np.zeros(0, np.int32),
        positions=np.zeros(0, np.int32),
        query_start_loc=query_start_loc,
        seq_lens=np.array([length for _, length in shapes], np.int32),
        logits_indices=np.zeros(0, np.int32),
        groups=(
            GroupInputs(
                table_start,
                np.array(list(itertools.chain(*tables)), np.int32),
                np.array(first_positions, np.int32),
                np.array(slots, np.int64),
            ),
        ),
    )
    group_inputs = on_host.groups[0]
    context = StepContext(
        pool=pool,
        query_start_loc=torch.from_numpy(query_start_loc),
        seq_lens=torch.from_numpy(on_host.seq_lens),
        groups=(
            GroupTables(
                torch.from_numpy(table_start),
                torch.from_numpy(group_inputs.blocks),
                torch.from_numpy(group_inputs.first_positions),
                torch.from_numpy(group_inputs.slot_mapping),
            ),
        ),
        longest_query=max(q for q, _ in shapes),
        on_host=on_host,
    )
    return Case(
        query=draw(int(query_start_loc[-1]), num_heads, head_dim),
        key=torch.cat([k for k, _ in new]),
        value=torch.cat([v for _, v in new]),
        keys=keys,
        values=values,
        context=context,
        call=AttentionCall(
            layer_module(1),
            scaling=0.8 * head_dim**-0.5,
            sliding_window=window,
            softcap=float(call.get("softcap", 0.0)),
            sinks=draw(num_heads) if call.get("sinks") else None,
        ),
    )


def by_hand(case: Case) -> torch.Tensor:
    """Token by token and head by head in float64, from contiguous K and V."""
    call, out = case.call, torch.zeros(case.query.shape, dtype=torch.float64)
    num_heads = case.query.shape[1]
    starts = case.context.on_host.query_start_loc.tolist()
    for r, (k, v) in enumerate(zip(case.keys, case.values, strict=True)):
        for t in range(starts[r], starts[r + 1]):
            position = len(k) - starts[r + 1] + t
            first = max(0, position - call.sliding_window + 1) if call.sliding_window else 0
            for h in range(num_heads):
                kv = h * k.shape[1] // num_heads
                visible = slice(first, position + 1)
                scores = k[visible, kv].double() @ case.query[t, h].double() * call.scaling
                if call.softcap:
                    scores = call.softcap * torch.tanh(scores / call.softcap)
                weights = scores.exp()
                total = weights.sum() + (0 if call.sinks is None else call.sinks[h].double().exp())
                out[t, h] = weights @ v[visible, kv].double() / total
    return out


def attend(backend, case: Case) -> torch.Tensor:
    backend.begin_step(case.context)
    return backend.attend(case.query, case.key, case.value, case.call)
