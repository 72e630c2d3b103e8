"""What attention takes, beside what reading its keys and values at the card's speed would take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.gpu.card import DEVICE, DTYPE, copy_bandwidth, has_room, seconds_on_device, sized
from tests.gpu.conftest import NewTable
from tests.support.attention_cases import layer_module
from tests.support.plan_builder import plan_of
from worker.attention.backends import choose_backend
from worker.attention.interface import AttentionBackend, AttentionCall, GroupTables, StepContext
from worker.batch.inputs import prepare_inputs
from worker.batch.padding import row_shape
from worker.kv.geometry import FULL_ATTENTION, CacheGeometry, CacheGroup
from worker.kv.kv_pool import KvPool

HEADS, KV_HEADS, HEAD_DIM = sized((32, 8, 128), (4, 2, 16))  # Llama-3.1-8B's
PAGE_SIZE = 16
MOST_LAYERS = sized(8, 2)  # read in turns, so that caches hold nothing of use
BATCHES = sized((1, 16, 64, 256), (1, 3))
CONTEXTS = sized((512, 4096, 32_768), (40, 600))
PREFILLS = sized((1, 4), (1,))
PROMPT = sized(2048, 70)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One step's attention over several layers, keys and values random."""

    backend: AttentionBackend
    context: StepContext
    query: torch.Tensor
    key: torch.Tensor
    num_layers: int

    def run(self) -> None:
        self.backend.begin_step(self.context)
        for layer in range(self.num_layers):
            call = AttentionCall(layer_module(layer), HEAD_DIM**-0.5)
            self.backend.attend(self.query, self.key, self.key, call)


def layer_bytes(batch: int, context: int) -> int:
    """Keys and values of one layer."""
    return batch * context * 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize


def work_of(batch: int, queries: int, context: int) -> Work | None:
    """`batch` requests of `context` tokens, the last `queries` of them new; None if too large."""
    num_layers = MOST_LAYERS
    while num_layers and not has_room(num_layers * layer_bytes(batch, context + PAGE_SIZE)):
        num_layers //= 2
    if not num_layers:
        return None
    group = CacheGroup(FULL_ATTENTION, tuple(range(num_layers)), 0, 1)
    geometry = CacheGeometry(
        (group,), num_layers, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, itemsize=DTYPE.itemsize
    )
    pages = -(-context // PAGE_SIZE)
    num_blocks = 2 + batch * pages
    pool = KvPool(geometry, num_blocks, DTYPE, DEVICE)
    pool.memory.normal_()
    plan = plan_of(
        token_ids=np.zeros(batch * queries),
        rows=np.arange(batch),
        query_start_loc=np.arange(batch + 1) * queries,
        seq_lens=np.full(batch, context),
        table_start=[np.arange(batch + 1) * pages],
        first_positions=np.zeros((1, batch)),
        blocks=2 + np.random.default_rng(1).permutation(batch * pages),
    )
    shape = row_shape(batch * queries, batch, 0, queries, 1)
    inputs = prepare_inputs(plan, [group], PAGE_SIZE, shape)
    tables = inputs.groups[0]
    backend = choose_backend("auto", DEVICE, DTYPE, HEAD_DIM, deterministic=False)
    context_of_step = StepContext(
        pool=pool,
        query_start_loc=torch.from_numpy(inputs.query_start_loc).to(DEVICE),
        seq_lens=torch.from_numpy(inputs.seq_lens).to(DEVICE),
        groups=(
            GroupTables(
                *(
                    torch.from_numpy(array).to(DEVICE)
                    for array in (
                        tables.table_start, tables.blocks, tables.first_positions,
                        tables.slot_mapping,
                    )
                )
            ),
        ),
        longest_query=queries,
        on_host=inputs,
    )  # fmt: skip
    query = torch.randn(batch * queries, HEADS, HEAD_DIM, dtype=DTYPE, device=DEVICE)
    key = torch.randn(batch * queries, KV_HEADS, HEAD_DIM, dtype=DTYPE, device=DEVICE)
    return Work(backend, context_of_step, query, key, num_layers)


@pytest.fixture(scope="module")
def bandwidth() -> float:
    return copy_bandwidth()


def test_decode_reads_keys_and_values_at_the_cards_speed(table: NewTable, bandwidth: float) -> None:
    """A decode's attention is all reading: what is far below the card's bandwidth is lost time."""
    rows = table(
        "Attention of a decode step",
        ["requests", "context", "µs per layer", "GB/s", "of copy bandwidth"],
        f"{HEADS}/{KV_HEADS} heads of {HEAD_DIM}, {DTYPE}, pages of {PAGE_SIZE} scattered, writing "
        f"keys and values included. A copy within the device moves {bandwidth / 1e9:,.0f} GB/s.",
    )
    for batch in BATCHES:
        for context in CONTEXTS:
            work = work_of(batch, 1, context)
            if work is None:
                rows.add(batch, context, "no room", "", "")
                continue
            seconds = seconds_on_device(work.run) / work.num_layers
            speed = layer_bytes(batch, context) / seconds
            del work
            rows.add(
                batch, context, f"{seconds * 1e6:,.1f}", f"{speed / 1e9:,.0f}",
                f"{speed / bandwidth:.0%}",
            )  # fmt: skip


def test_prefill_time(table: NewTable, bandwidth: float) -> None:
    """A prompt's attention is arithmetic; its bytes at the card's bandwidth are the lower bound."""
    rows = table(
        f"Attention of a prefill of {PROMPT} tokens",
        ["prompts", "µs per layer", "TFLOP/s", "its bytes at copy bandwidth, µs"],
    )
    for batch in PREFILLS:
        work = work_of(batch, PROMPT, PROMPT)
        if work is None:
            rows.add(batch, "no room", "", "")
            continue
        seconds = seconds_on_device(work.run) / work.num_layers
        operations = 4 * HEADS * HEAD_DIM * batch * PROMPT * (PROMPT + 1) / 2
        moved = 2 * work.query.nbytes + 4 * work.key.nbytes  # keys and values: written, then read
        rows.add(
            batch, f"{seconds * 1e6:,.1f}", f"{operations / seconds / 1e12:,.1f}",
            f"{moved / bandwidth * 1e6:,.1f}",
        )  # fmt: skip
