"""Attention backends against float64 arithmetic, and the life of the C kernel."""

from __future__ import annotations

import itertools
import logging
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from worker.attention import choose_backend
from worker.attention.cpu import CpuBackend
from worker.attention.interface import AttentionCall, GroupTables, StepContext
from worker.attention.reference import ReferenceBackend
from worker.geometry import FULL_ATTENTION, CacheGroup, Geometry
from worker.inputs import GroupInputs, StepInputs
from worker.kernels import build
from worker.kernels.build import kernel_library
from worker.kv_pool import KvPool

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float64: 1e-12}
# (query length, sequence length): decodes, a whole prompt, chunks over key blocks and pages
SHAPES = [(1, 1), (1, 130), (5, 5), (3, 64), (40, 70), (29, 150)]
CALLS = {
    "plain": {},
    "window": {"sliding_window": 9},
    "window over key blocks": {"sliding_window": 100},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 33, "softcap": 5.0, "sinks": True},
}


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    query: torch.Tensor  # [T, H, D]
    key: torch.Tensor  # [T, Hkv, D] of the query's tokens: written by the step itself
    value: torch.Tensor
    keys: list[torch.Tensor]  # per request [L, Hkv, D]
    values: list[torch.Tensor]
    pages: torch.Tensor
    context: StepContext
    call: AttentionCall


def make_case(
    shapes: Sequence[tuple[int, int]],
    grouped: int,
    head_dim: int,
    dtype: torch.dtype,
    page_size: int = 8,
    window_tables: bool = False,
    **call: object,
) -> Case:
    """Random K and V, written block by block in scattered order; what no request owns is NaN, so
    that a read beside the tables shows. With window_tables, tables start where the window does."""
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
    geometry = Geometry(
        (group,), 2, num_heads, num_kv_heads, head_dim, page_size, itemsize=dtype.itemsize
    )
    pool = KvPool(geometry, 2 + sum(num_pages), dtype, CPU)
    pool.blocks(0).fill_(math.nan)
    _, pages = pool.layer_views(1)
    order = (2 + torch.randperm(sum(num_pages), generator=generator)).tolist()
    keys, values, tables, slots = [], [], [], []
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
        keys.append(k)
        values.append(v)
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
        backend=ReferenceBackend(),
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
    queries = [q for q, _ in shapes]
    return Case(
        query=draw(int(query_start_loc[-1]), num_heads, head_dim),
        key=torch.cat([k[len(k) - q :] for k, q in zip(keys, queries, strict=True)]),
        value=torch.cat([v[len(v) - q :] for v, q in zip(values, queries, strict=True)]),
        keys=keys,
        values=values,
        pages=pages,
        context=context,
        call=AttentionCall(
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
    return backend.attend(
        case.query,
        case.key,
        case.value,
        case.pages,
        case.context,
        case.context.groups[0],
        case.call,
    )


@pytest.fixture(scope="module")
def kernel():
    torch.set_num_threads(1)
    return CpuBackend(kernel_library())


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize(("grouped", "head_dim"), [(1, 64), (3, 80), (4, 128), (3, 12)])
def test_backends_agree_with_float64_arithmetic(kernel, grouped, head_dim, call):
    """Masks, windows, softcap, sinks, grouping, odd head sizes: each backend against the formula,
    on requests of all shapes at once."""
    case = make_case(SHAPES, grouped, head_dim, torch.float32, **call)
    expected = by_hand(case)
    for backend in (kernel, ReferenceBackend()):
        error = (attend(backend, case) - expected).abs().max()
        assert error < TOLERANCE[torch.float32], backend.name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(kernel, dtype):
    """16-bit pools must be read and written right; the reference takes float64 too."""
    backends = [ReferenceBackend()] + ([kernel] if dtype != torch.float64 else [])
    for call in (CALLS["plain"], CALLS["all"]):
        case = make_case(SHAPES, 3, 20, dtype, **call)
        expected = by_hand(case)
        for backend in backends:
            out = attend(backend, case)
            assert out.dtype == dtype
            assert (out - expected).abs().max() < TOLERANCE[dtype], backend.name


@pytest.mark.parametrize("page_size", [1, 5, 16, 128])
def test_page_sizes(kernel, page_size):
    """Pages smaller than, larger than and across the kernel's blocks of keys."""
    case = make_case(SHAPES, 3, 16, torch.float32, page_size)
    expected = by_hand(case)
    for backend in (kernel, ReferenceBackend()):
        assert (attend(backend, case) - expected).abs().max() < TOLERANCE[torch.float32]


def test_tables_that_start_with_the_window(kernel):
    """Sliding tables leave out what the window no longer reads: first_positions counts."""
    case = make_case(SHAPES, 3, 16, torch.float32, window_tables=True, sliding_window=21)
    assert case.context.on_host.groups[0].first_positions.any()
    expected = by_hand(case)
    for backend in (kernel, ReferenceBackend()):
        assert (attend(backend, case) - expected).abs().max() < TOLERANCE[torch.float32]


@pytest.mark.parametrize("call", [CALLS["plain"], CALLS["all"]], ids=["plain", "all"])
def test_kernel_bits_do_not_depend_on_chunks(kernel, call):
    """A token computed in a chunk of 29 and one computed alone must agree to the last bit."""
    case = make_case([(29, 150)], 3, 64, torch.float32, **call)
    whole = attend(kernel, case)
    slots = case.context.groups[0].slot_mapping.tolist()
    for t in range(29):
        case.context.query_start_loc[1] = 1
        case.context.seq_lens[0] = 150 - 29 + t + 1
        case.context.groups[0].slot_mapping[0] = slots[t]
        token = (tensor[t : t + 1] for tensor in (case.query, case.key, case.value))
        alone = kernel.attend(*token, case.pages, case.context, case.context.groups[0], case.call)
        assert torch.equal(alone[0], whole[t])


def test_writes_land_in_their_slots_and_nowhere_else(kernel):
    """Both backends write the same pool, from strided inputs, and leave other slots alone."""
    geometry = Geometry((CacheGroup(FULL_ATTENTION, (0, 1), 0, 1),), 2, 4, 2, 12, 4, 4)
    query = torch.randn(4, 5, 12).transpose(0, 1)
    key = torch.randn(2, 5, 12).transpose(0, 1)  # [5, 2, 12], as models hand it over
    value = torch.randn(5, 2, 12)
    slots = np.array([9, 8, 31, 16, 12])
    ones = np.ones(5, np.int32)
    inputs = StepInputs(
        5, 5, 0, ones, ones, ones, np.arange(6, dtype=np.int32), ones, ones[:0],
        (GroupInputs(np.arange(6, dtype=np.int32), slots.astype(np.int32) // 4, 0 * ones, slots),),
    )  # fmt: skip
    tables = GroupTables(
        *(torch.from_numpy(getattr(inputs.groups[0], field)) for field in GroupTables.__slots__)
    )
    lengths = (torch.from_numpy(inputs.query_start_loc), torch.from_numpy(inputs.seq_lens))
    pools = []
    for backend in (kernel, ReferenceBackend()):
        pool = KvPool(geometry, 8, torch.float32, CPU)
        context = StepContext(backend, pool, *lengths, (tables,), 1, inputs)
        pages = pool.layer_views(1)[1]
        backend.attend(query, key, value, pages, context, tables, AttentionCall(1.0))
        pools.append(pool.blocks(0))
    assert torch.equal(pools[0], pools[1])
    assert torch.equal(pools[0][7, 1, 0, :, 3], key[2])
    assert torch.equal(pools[0][2, 1, 1, :, 1], value[0])
    assert pools[0].count_nonzero() == 2 * key.numel()


def test_several_processes_build_at_once(tmp_path: Path):
    """Workers that start together share a cache folder: none may load half a library."""
    # build.py needs the standard library only, so it runs by itself, without importing torch
    program = (
        "import sys, pathlib; print(kernel_library(pathlib.Path(sys.argv[1])).attend.__name__)"
    )
    source = f"import runpy, sys; globals().update(runpy.run_path({build.__file__!r})); {program}"
    command = [sys.executable, "-W", "error", "-c", source, str(tmp_path)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path.parent)
        for _ in range(3)
    ]
    assert [process.communicate(timeout=120)[0] for process in started] == ["attend\n"] * 3
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path: Path):
    """A service account may have no home; the kernel is then built for this process alone."""
    blocker = tmp_path / "file"
    blocker.write_text("a file where the folder should be")
    assert kernel_library(blocker / "cache").attend


def test_falls_back_with_one_warning_without_a_compiler(monkeypatch, tmp_path, caplog):
    """Slower, not broken; and the log says why it is slower."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path))
    with caplog.at_level(logging.WARNING, "worker.attention"):
        backend = choose_backend("auto", CPU, torch.float32, deterministic=False)
    assert backend.name == "reference"
    assert len(caplog.records) == 1
    assert "no C compiler 'cc'" in caplog.text


@pytest.mark.parametrize(
    ("wanted", "dtype", "message"),
    [
        ("triton", torch.float32, "allowed are auto, reference, cpu; triton comes later"),
        ("cpu", torch.float64, "the C kernel has no torch.float64"),
    ],
)
def test_impossible_backends_are_refused(wanted, dtype, message):
    """A wrong choice must name what is allowed, not end in a fallback that nobody asked for."""
    with pytest.raises(ValueError, match=message):
        choose_backend(wanted, CPU, dtype, deterministic=False)
