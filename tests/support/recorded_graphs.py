"""CUDA graphs played on a CPU: operations are recorded while one is "captured", and a replay runs
them again on the same tensors, with the same numbers of the host, into the same memory.

So what a graph would bake in is baked in here, too; what it leaves in memory that the next replay
overwrites is overwritten. `DeviceBackend` is attention that takes nothing from the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worker import runner
from worker.attention.interface import AttentionCall, StepContext
from worker.step import graphs


class RecordedGraph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def replay(self) -> None:
        for function, args, options, results in self.calls:
            again = function(*args, **options)
            for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                # views and in-place results are where they were
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self._graph.calls.append((func, args, kwargs or {}, results))
        return results


class _Stream:
    def synchronize(self) -> None: ...


class DeviceBackend:
    """Every token looks at all entries of its request's table that there can be."""

    name = "device"
    captures = 0

    def begin_step(self, step: StepContext) -> None:
        self._step = step
        if step.on_host is None:
            self.captures += 1

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        group, pages = self._step.pool.layer_views(call.layer)
        tables = self._step.groups[group]
        page_size = pages.shape[3]
        slots = tables.slot_mapping
        pages[slots // page_size, 0, :, slots % page_size] = key
        pages[slots // page_size, 1, :, slots % page_size] = value
        tokens = torch.arange(len(query))
        starts = self._step.query_start_loc
        owner = torch.searchsorted(starts, tokens.int(), right=True) - 1
        owner = owner.clamp(max=len(self._step.seq_lens) - 1)
        position = self._step.seq_lens[owner] - starts[owner + 1] + tokens
        # every position that a request can have, wherever its table begins
        seen = torch.arange(64)[None, :]
        place = seen - tables.first_positions[owner][:, None]
        entry = tables.table_start[owner][:, None] + place.clamp(min=0) // page_size
        block = tables.blocks[entry.clamp(0, len(tables.blocks) - 1)].long()
        is_visible = (place >= 0) & (seen <= position[:, None])
        if call.sliding_window:
            is_visible &= seen > (position - call.sliding_window)[:, None]
        block = torch.where(is_visible, block, 0)  # what nobody owns may hold anything
        of_kv = pages[block, :, :, seen % page_size]  # [T, 64, 2, Hkv, D]
        grouped = query.shape[1] // pages.shape[2]
        k, v = (of_kv[:, :, i].repeat_interleave(grouped, 2) for i in range(2))
        scores = torch.einsum("thd,tshd->ths", query, k) * call.scaling
        scores = scores.masked_fill(~is_visible[:, None], -torch.inf)
        weights = scores.softmax(-1).nan_to_num()  # padding may see nothing
        return torch.einsum("ths,tshd->thd", weights, v)


def play(monkeypatch: pytest.MonkeyPatch) -> DeviceBackend:
    """From now on runners capture, on a CPU."""
    backend = DeviceBackend()

    @contextmanager
    def graph(graph: RecordedGraph, **_: Any) -> Iterator[None]:
        with _Recorder(graph):
            yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    monkeypatch.setattr(graphs, "gc", _NoCollector)  # seconds, and nothing to protect here
    monkeypatch.setattr(runner, "choose_backend", lambda *_: backend)
    monkeypatch.setattr(runner, "_captures", lambda *_: True)
    return backend


class _NoCollector:
    collect = enable = disable = staticmethod(lambda: None)
