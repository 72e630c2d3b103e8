"""What attention costs on this CPU: decode steps and chunks of SmolLM2's shape, scattered pages.

`python -m tests.bench.attention_speed` prints the tables. A decode step attends in each of 30
layers, over 0.4 or 1.5 GB of keys and values, so nothing is found in a cache. Every contestant runs
in turns with the others; the figures are medians over the turns, and what reading takes is the
best turn: that is what the machine can do.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tests.support.attention_cases import layer_module
from worker.attention.cpu import CpuBackend
from worker.attention.interface import AttentionBackend, AttentionCall, GroupTables, StepContext
from worker.attention.reference import ReferenceBackend
from worker.batch.inputs import GroupInputs, StepInputs
from worker.kernels.build import kernel_library
from worker.kv.geometry import FULL_ATTENTION, CacheGeometry, CacheGroup
from worker.kv.kv_pool import KvPool

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS, PAGE_SIZE = 9, 3, 64, 30, 16
_CPU = torch.device("cpu")

# Reads `n` floats on all threads, as fast as the memory gives them: eight sums, no dependency.
_READER = """
#include <stdint.h>
typedef float vec __attribute__((vector_size(32), aligned(4)));
float read_floats(const float *p, int64_t n, int threads) {
  float total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total)
  for (int part = 0; part < threads; part++) {
    vec sums[8] = {{0}};
    for (int64_t i = n / 64 * part / threads * 64; i < n / 64 * (part + 1) / threads * 64; i += 64)
      for (int j = 0; j < 8; j++) sums[j] += *(const vec *)(p + i + 8 * j);
    for (int j = 0; j < 8; j++) total += sums[j][0];
  }
  return total;
}
"""


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """Milliseconds per layer of one decode step: `num_rows` requests of `num_tokens` tokens."""

    num_rows: int
    num_tokens: int
    kv_bytes: int  # of one layer
    attention: float
    reading: float  # the same bytes at the machine's read bandwidth
    gather: float  # per-request gather + SDPA

    def __str__(self) -> str:
        gigabytes = self.kv_bytes / self.reading / 1e6
        return (
            f"attention, decode {self.num_rows:2d} x {self.num_tokens}, per layer: "
            f"{self.attention:.2f} ms; reading {self.kv_bytes / 1e6:.1f} MB at {gigabytes:.1f} "
            f"GB/s: {self.reading:.2f} ms (ratio {self.attention / self.reading:.2f}); "
            f"gather + SDPA: {self.gather:.2f} ms (ratio {self.gather / self.attention:.1f})"
        )


def step_context(
    shapes: list[tuple[int, int]],
    num_layers: int = NUM_LAYERS,
    kv_dtype: torch.dtype = torch.float32,
) -> StepContext:
    """A step of requests (query length, sequence length) over a pool of random K and V."""
    pages = [-(-length // PAGE_SIZE) for _, length in shapes]
    group = CacheGroup(FULL_ATTENTION, tuple(range(num_layers)), 0, 1)
    geometry = CacheGeometry(
        (group,), num_layers, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, kv_dtype.itemsize
    )
    pool = KvPool(geometry, 2 + sum(pages), kv_dtype, _CPU)
    pool.memory.uniform_(-1, 1)
    blocks = 2 + np.random.default_rng(0).permutation(sum(pages)).astype(np.int32)
    table_start = np.cumsum([0, *pages], dtype=np.int32)
    query_lens = np.array([q for q, _ in shapes], np.int32)
    seq_lens = np.array([length for _, length in shapes], np.int32)
    places = np.concatenate([np.arange(length - q, length) for q, length in shapes])
    entries = np.repeat(table_start[:-1], query_lens) + places // PAGE_SIZE
    slots = blocks[entries].astype(np.int64) * PAGE_SIZE + places % PAGE_SIZE
    none = np.zeros(0, np.int32)
    on_host = StepInputs(
        num_tokens=len(places),
        num_requests=len(shapes),
        num_logits=0,
        token_ids=none,
        token_rows=none,
        positions=places.astype(np.int32),
        query_start_loc=np.cumsum([0, *query_lens], dtype=np.int32),
        seq_lens=seq_lens,
        logits_indices=none,
        groups=(GroupInputs(table_start, blocks, 0 * seq_lens, slots),),
    )
    return StepContext(
        pool=pool,
        query_start_loc=torch.from_numpy(on_host.query_start_loc),
        seq_lens=torch.from_numpy(seq_lens),
        groups=(
            GroupTables(
                *(torch.from_numpy(getattr(on_host.groups[0], n)) for n in GroupTables.__slots__)
            ),
        ),
        longest_query=int(query_lens.max()),
        on_host=on_host,
    )


def in_turns(contestants: Mapping[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Seconds of each contestant in each turn; the first turn warms up and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(turns + 1):
        for name, run in contestants.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    return {name: of_name[1:] for name, of_name in seconds.items()}


def one_step(context: StepContext, backend: AttentionBackend) -> Callable[[], None]:
    """Attention of all layers."""
    num_tokens = len(context.groups[0].slot_mapping)
    query = torch.randn(num_tokens, NUM_HEADS, HEAD_DIM)
    key, value = torch.randn(2, num_tokens, NUM_KV_HEADS, HEAD_DIM)
    calls = [
        AttentionCall(layer_module(layer), HEAD_DIM**-0.5)
        for layer in range(context.pool.geometry.num_layers)
    ]

    def run() -> None:
        backend.begin_step(context)
        for call in calls:
            backend.attend(query, key, value, call)

    return run


def reader() -> Callable[[torch.Tensor], object]:
    """Something that reads a float32 tensor on all threads, and does no more than that."""
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "read.c"), Path(folder, "read.so")
        source.write_text(_READER)
        compiler = os.environ.get("CC") or "cc"
        flags = ["-O3", "-march=native", "-fopenmp", "-fPIC", "-shared"]
        subprocess.run([compiler, *flags, "-o", built, source], check=True, timeout=60)
        read = ctypes.CDLL(str(built)).read_floats
    read.restype = ctypes.c_float

    def run(memory: torch.Tensor) -> None:
        read(
            ctypes.c_void_p(memory.data_ptr()),
            ctypes.c_int64(memory.numel()),
            torch.get_num_threads(),
        )

    return run


def decode(num_rows: int, num_tokens: int = 512, turns: int = 7) -> DecodeFigures:
    """One decode step, in turns with reading the same memory and with gather + SDPA: medians, and
    the best turn of reading."""
    kernel, reference = CpuBackend(kernel_library()), ReferenceBackend()
    context = step_context([(1, num_tokens)] * num_rows)
    kv_bytes = num_rows * num_tokens * 2 * NUM_KV_HEADS * HEAD_DIM * 4
    read, parts = reader(), context.pool.memory.split(kv_bytes // 4)[:NUM_LAYERS]
    seconds = in_turns(
        {
            "attention": one_step(context, kernel),
            "reading": lambda: [read(part) for part in parts],
            "gather": one_step(context, reference),
        },
        turns,
    )
    return DecodeFigures(
        num_rows,
        num_tokens,
        kv_bytes,
        attention=statistics.median(seconds["attention"]) * 1000 / NUM_LAYERS,
        reading=min(seconds["reading"]) * 1000 / NUM_LAYERS,
        gather=statistics.median(seconds["gather"]) * 1000 / NUM_LAYERS,
    )


def narrow_pool(num_rows: int, num_tokens: int, num_queries: int = 1, turns: int = 7) -> str:
    """A pool of float16 beside one of float32, of the same requests."""
    kernel, shapes = CpuBackend(kernel_library()), [(num_queries, num_tokens)] * num_rows
    num_layers = NUM_LAYERS if num_queries == 1 else 6
    contestants = {
        str(dtype): one_step(step_context(shapes, num_layers, dtype), kernel)
        for dtype in (torch.float32, torch.float16)
    }
    wide, narrow = (statistics.median(of) for of in in_turns(contestants, turns).values())
    return (
        f"attention, {num_queries} of {num_tokens} x {num_rows}, per layer: keys and values of "
        f"float32 {wide * 1000 / num_layers:.2f} ms, of float16 {narrow * 1000 / num_layers:.2f} "
        f"ms (ratio {wide / narrow:.2f})"
    )


def chunk(num_queries: int, num_tokens: int, turns: int = 5) -> str:
    """One request's chunk in the kernel and by gather + SDPA, over a few layers."""
    kernel, reference = CpuBackend(kernel_library()), ReferenceBackend()
    context = step_context([(num_queries, num_tokens)], num_layers=6)
    seconds = in_turns(
        {"kernel": one_step(context, kernel), "gather": one_step(context, reference)}, turns
    )
    kernel_ms, gather_ms = (statistics.median(of) * 1000 / 6 for of in seconds.values())
    return (
        f"attention, chunk {num_queries} of {num_tokens}, per layer: {kernel_ms:.2f} ms; "
        f"gather + SDPA: {gather_ms:.2f} ms (ratio {gather_ms / kernel_ms:.2f})"
    )


def main() -> None:
    print(f"{torch.get_num_threads()} threads")
    for num_rows in (16, 64):
        print(decode(num_rows))
    print(decode(1, 2048))
    for shape in ((32, 512), (128, 512), (256, 1500), (512, 512)):
        print(chunk(*shape))
    for rows, tokens, queries in ((64, 160, 1), (64, 96, 1), (20, 160, 1), (1, 512, 512)):
        print(narrow_pool(rows, tokens, queries))


if __name__ == "__main__":
    main()
