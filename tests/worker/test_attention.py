"""Attention backends against float64 arithmetic, and the life of the C kernel."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.attention_cases import (
    CALLS,
    CPU,
    TOLERANCE,
    attend,
    by_hand,
    copied,
    layer_module,
    make_case,
)
from worker.attention.backends import choose_backend
from worker.attention.cpu import CpuBackend
from worker.attention.interface import AttentionCall, GroupTables, StepContext
from worker.attention.reference import ReferenceBackend
from worker.batch.inputs import GroupInputs, StepInputs
from worker.kernels import build
from worker.kernels.build import kernel_library
from worker.kv.geometry import FULL_ATTENTION, CacheGeometry, CacheGroup
from worker.kv.kv_pool import KvPool

# (query length, sequence length): decodes, a whole prompt, chunks over key blocks and pages
SHAPES = [(1, 1), (1, 130), (5, 5), (3, 64), (40, 70), (29, 150)]


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


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("page_size", [8, 16])
def test_pools_of_another_dtype(kernel, dtype, kv_dtype, page_size):
    """kv_cache_dtype: what a step writes is rounded to the pool's dtype, nothing else is."""
    for backend in (kernel, ReferenceBackend()):
        for call in (CALLS["plain"], CALLS["all"]):
            case = make_case(SHAPES, 3, 64, dtype, page_size, kv_dtype=kv_dtype, **call)
            out = attend(backend, case)
            assert out.dtype == dtype
            assert (out - by_hand(case)).abs().max() < TOLERANCE[dtype], backend.name


@pytest.mark.parametrize("page_size", [5, 16, 64])
@pytest.mark.parametrize(("grouped", "head_dim"), [(1, 64), (3, 64), (4, 128), (3, 20)])
def test_a_narrow_pool_has_the_bits_of_a_wide_one(kernel, grouped, head_dim, page_size):
    """Reading float16 as it lies, or converted first where pages or heads do not allow that, must
    round nothing and keep the order of every sum: bits are those of rounded keys and values."""
    for call in (CALLS["plain"], CALLS["window over key blocks"]):
        narrow = make_case(
            SHAPES, grouped, head_dim, torch.float32, page_size, kv_dtype=torch.float16, **call
        )
        wide = replace(
            narrow,
            context=replace(narrow.context, pool=copied(narrow.context.pool, torch.float32)),
            key=narrow.key.half().float(),
            value=narrow.value.half().float(),
        )
        assert torch.equal(attend(kernel, narrow), attend(kernel, wide))


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


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("call", [CALLS["plain"], CALLS["all"]], ids=["plain", "all"])
def test_kernel_bits_do_not_depend_on_chunks(kernel, call, page_size, kv_dtype):
    """A token computed in a chunk of 29 and one computed alone must agree to the last bit, be
    pages read as they lie or copied first."""
    case = make_case([(29, 150)], 3, 64, torch.float32, page_size, kv_dtype=kv_dtype, **call)
    whole = attend(kernel, case)
    slots = case.context.groups[0].slot_mapping.tolist()
    for t in range(29):
        case.context.query_start_loc[1] = 1
        case.context.seq_lens[0] = 150 - 29 + t + 1
        case.context.groups[0].slot_mapping[0] = slots[t]
        token = (tensor[t : t + 1] for tensor in (case.query, case.key, case.value))
        alone = kernel.attend(*token, case.call)
        assert torch.equal(alone[0], whole[t])


def test_writes_land_in_their_slots_and_nowhere_else(kernel):
    """Both backends write the same pool, from strided inputs, and leave other slots alone."""
    geometry = CacheGeometry((CacheGroup(FULL_ATTENTION, (0, 1), 0, 1),), 2, 4, 2, 12, 4, 4)
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
        backend.begin_step(StepContext(pool, *lengths, (tables,), 1, inputs))
        backend.attend(query, key, value, AttentionCall(layer_module(1), 1.0))
        pools.append(pool.blocks(0))
    assert torch.equal(pools[0], pools[1])
    assert torch.equal(pools[0][7, 1, 0, :, 3], key[2])
    assert torch.equal(pools[0][2, 1, 1, :, 1], value[0])
    assert pools[0].count_nonzero() == 2 * key.numel()


@pytest.fixture
def small_source(tmp_path: Path) -> Path:
    """Stands for all kernels, whose build takes seconds."""
    source = tmp_path / "small.c"
    source.write_text("int attend(void) { return 0; }")
    return source


def test_several_processes_build_at_once(tmp_path: Path, small_source: Path):
    """Workers that start together share a cache folder: none may load half a library."""
    # build.py needs the standard library only, so it runs by itself, without importing torch
    cache = tmp_path / "cache"
    program = "\n".join(
        [
            "import pathlib, runpy, sys",
            f"build = runpy.run_path({build.__file__!r})['kernel_library']",
            f"build.__globals__['_SOURCES'] = (pathlib.Path({str(small_source)!r}),)",
            "print(build(pathlib.Path(sys.argv[1])).attend.__name__)",
        ]
    )
    command = [sys.executable, "-W", "error", "-c", program, str(cache)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path.parent)
        for _ in range(3)
    ]
    assert [process.communicate(timeout=120)[0] for process in started] == ["attend\n"] * 3
    assert [path.suffix for path in cache.iterdir()] == [".so"]


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path: Path, small_source, monkeypatch):
    """A service account may have no home; the kernel is then built for this process alone."""
    monkeypatch.setattr(build, "_SOURCES", (small_source,))
    blocker = tmp_path / "file"
    blocker.write_text("a file where the folder should be")
    assert kernel_library(blocker / "cache").attend


def test_falls_back_with_one_warning_without_a_compiler(monkeypatch, tmp_path, caplog):
    """Slower, not broken; and the log says why it is slower."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path))
    with caplog.at_level(logging.WARNING, "worker.attention"):
        backend = choose_backend("auto", CPU, torch.float32, head_dim=64, deterministic=False)
    assert backend.name == "reference"
    assert len(caplog.records) == 1
    assert "no C compiler 'cc'" in caplog.text


@pytest.mark.parametrize(
    ("wanted", "device", "dtype", "message"),
    [
        ("flash", "cpu", torch.float32, "'flash'; allowed are auto, reference, cpu, triton"),
        ("cpu", "cpu", torch.float64, "the C kernel does not support torch.float64"),
        ("cpu", "cuda:0", torch.float32, "the C kernel runs on the CPU, not on cuda:0"),
        ("triton", "cpu", torch.float32, "the Triton kernel runs on CUDA, not on cpu"),
        ("triton", "cuda:0", torch.float64, "the Triton kernel does not support torch.float64"),
        ("triton", "cuda:0", torch.float16, "heads of at most 256, not of 512"),
    ],
)
def test_impossible_backends_are_refused(wanted, device, dtype, message):
    """A wrong choice must name what is allowed, not end in a fallback that nobody asked for."""
    with pytest.raises(ValueError, match=message):
        choose_backend(wanted, torch.device(device), dtype, head_dim=512, deterministic=False)


def test_cuda_falls_back_with_one_warning_without_triton(monkeypatch, caplog):
    """Where torch came without triton, a GPU serves all the same; and the log says why slowly."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "worker.attention.cuda", raising=False)
    with caplog.at_level(logging.WARNING, "worker.attention"):
        backend = choose_backend(
            "auto", torch.device("cuda:0"), torch.float16, head_dim=64, deterministic=False
        )
    assert backend.name == "reference"
    assert len(caplog.records) == 1
    assert "triton cannot be imported" in caplog.text


def test_a_device_without_a_kernel_gets_the_reference_silently(caplog):
    """There is nothing faster to be had on such a device: a warning would only alarm."""
    backend = choose_backend(
        "auto", torch.device("mps"), torch.float32, head_dim=64, deterministic=False
    )
    assert backend.name == "reference"
    assert not caplog.records
