"""How many chunks fit, and that the plan's numbers are real bytes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.support.loading import configure, load
from tests.support.tiny_models import gemma3, llama
from worker.kv.kv_pool import KvPool
from worker.kv.swap import SwapPool
from worker.memory.pool_size import OutOfMemory, free_memory, plan_memory, weight_bytes

MIB, GIB = 2**20, 2**30


@pytest.fixture
def loaded(saved):
    return load(saved(llama)[0])


@pytest.mark.parametrize("make", [llama, gemma3], ids=["one group", "several groups"])
@pytest.mark.parametrize("num_blocks", [3, 37, 4000])
def test_predicted_bytes_equal_the_tensors(saved, make, num_blocks):
    """A prediction that is off by a factor ends in the kernel's out-of-memory killer."""
    loaded = load(saved(make)[0])
    settings = configure(num_blocks=num_blocks, cpu_offload_space=0.01)
    plan = plan_memory(loaded, settings, "cpu", free=GIB)
    pool = KvPool(plan.geometry, plan.num_chunks, loaded.kv_dtype, loaded.device)
    swap = SwapPool(pool, plan.num_swap_chunks)
    assert (plan.pool, plan.swap) == (pool.num_bytes, swap.num_bytes)
    assert plan.tokens >= num_blocks * 4
    assert 0 <= int(0.01 * GIB) - plan.swap < plan.geometry.chunk_bytes
    weights = [*loaded.model.parameters(), *loaded.model.buffers()]
    assert plan.weights == sum(tensor.nbytes for tensor in weights)


def test_the_pool_takes_what_is_left(loaded):
    """Everything together stays within max_memory_percent of what is free, with less than a chunk
    to spare; in the CPU's memory the swap pool is a part of it."""
    long = replace(loaded, max_model_len=10**6)
    for attention, free, space in (
        ("cpu", 512 * MIB, 0),
        ("cpu", 512 * MIB, 1 / 64),
        ("reference", 4 * GIB, 0),
    ):
        settings = configure(max_memory_percent=0.5, cpu_offload_space=space)
        plan = plan_memory(long, settings, attention, free)
        assert plan.swap == space * GIB // plan.geometry.chunk_bytes * plan.geometry.chunk_bytes
        assert 0 <= free // 2 - plan.total < 2 * plan.geometry.chunk_bytes


def test_narrower_keys_and_values_double_what_fits(saved, loaded):
    """Half the bytes and no more tokens would be no gain; what a step computes stays as wide."""
    halves = load(saved(llama)[0], kv_cache_dtype="float16")
    wide, narrow = (
        plan_memory(replace(one, max_model_len=10**6), configure(), "cpu", free=512 * MIB)
        for one in (loaded, halves)
    )
    assert narrow.step == wide.step
    assert narrow.num_chunks // 2 == wide.num_chunks
    assert narrow.geometry.chunk_bytes * 2 == wide.geometry.chunk_bytes


def test_never_more_than_can_be_used(loaded):
    """On a large machine a tiny model must not take half of the memory."""
    plan = plan_memory(loaded, configure(), "cpu", free=10**6 * MIB)
    assert plan.num_chunks == 2 + 32 * 256 // 4


def test_groups_suit_the_pool(saved):
    """A small pool gets small chunks, however large the machine: a chunk is 1/500 of it at most."""
    loaded = load(saved(gemma3)[0])
    large = plan_memory(loaded, configure(num_blocks=20_000), "cpu", free=10 * GIB)
    small = plan_memory(loaded, configure(num_blocks=20), "cpu", free=10 * GIB)
    assert len(large.geometry.groups) == 2
    assert len(small.geometry.groups) == 6
    assert large.geometry.chunk_bytes <= large.pool / 500


def test_default_share_and_step_costs(loaded):
    """0.6 on the CPU; longer steps cost memory."""
    plan = plan_memory(loaded, configure(), "cpu", free=1024 * MIB)
    assert plan.percent == 0.6
    longer = plan_memory(loaded, configure(max_batch_tokens=512), "cpu", free=1024 * MIB)
    assert longer.step.activations == 2 * plan.step.activations


@pytest.mark.parametrize("settings", [{"num_blocks": 1000}, {}], ids=["num_blocks", "auto"])
def test_refusal_has_the_numbers(loaded, settings):
    """Who reads it must know what to change, and by how much."""
    with pytest.raises(OutOfMemory, match=r"of 0\.5 MiB free on cpu at 60%.*max_batch_tokens"):
        plan_memory(loaded, configure(**settings), "cpu", free=MIB // 2)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (0.9, r"is 0\.9 GiB, but of 1\.00 GiB free .* at most 80% .*: 0\.80 GiB"),
        (-1, r"is -1\.0 GiB; it must be at least 0"),
        (1e-6, r"is 1e-06 GiB, less than one chunk of 0\.00\d MiB"),
    ],
)
def test_swap_space_is_bounded(loaded, space, message):
    """Pinned memory that the machine lacks takes everything else down with it."""
    with pytest.raises(ValueError, match=f"cpu_offload_space {message}"):
        plan_memory(loaded, configure(cpu_offload_space=space), "cpu", free=GIB)


def test_swap_space_lies_beside_a_device(loaded):
    """On CUDA the swap pool takes nothing from the KV pool; the host's memory bounds it."""
    there = replace(loaded, device=torch.device("cuda", 0))
    settings = configure(cpu_offload_space=2, num_blocks=10)
    plan = plan_memory(there, settings, "reference", free=GIB, host_free=4 * GIB)
    assert plan.num_swap_chunks == 2 * GIB // plan.geometry.chunk_bytes
    with pytest.raises(OutOfMemory, match=r"of 2\.00 GiB free in the host's memory"):
        plan_memory(there, settings, "reference", free=GIB, host_free=2 * GIB)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_resident_memory_stays_inside_the_plan():
    """What the plan leaves out is what the machine runs out of, in the middle of a busy day."""
    cases = [("gemma3", "cpu"), ("gpt_oss", "reference")]
    command = [sys.executable, "-W", "ignore", "-m", "tests.bench.peak_memory"]
    command += [word for case in cases for word in case]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200)
    for case, line in zip(cases, done.stdout.splitlines(), strict=True):
        planned, taken = (int(number) for number in line.split())
        print(f"{case}: planned {planned / MIB:.0f} MiB, taken {taken / MIB:.0f} MiB")
        assert 48 * MIB < taken <= planned, case


@pytest.mark.parametrize("percent", [-0.1, 1.5])
def test_bad_percent(loaded, percent):
    """A share is a share."""
    with pytest.raises(ValueError, match=f"max_memory_percent is {percent}"):
        plan_memory(loaded, configure(max_memory_percent=percent), "cpu", free=MIB)


def test_table_is_printable(loaded):
    """What the worker logs at start."""
    text = str(plan_memory(loaded, configure(num_blocks=64), "cpu", free=1024 * MIB))
    assert "KV pool" in text
    assert "66 chunks of 0.001 MiB in 1 cache group hold 256 tokens" in text
    assert "1 cache group" in text
    assert "gathered" not in text
    assert "swap" not in text


def test_tied_weights_count_once(saved):
    """lm_head and embeddings of most small models are one tensor, until lm_head is packed."""
    loaded = load(saved(llama)[0], weight_format="unpacked")
    model = loaded.model
    before = weight_bytes(loaded)
    size = model.lm_head.weight.nbytes
    model.lm_head.weight = model.model.embed_tokens.weight
    assert weight_bytes(loaded) == before - size


def test_free_memory_is_asked_of_the_system(loaded):
    """Zero or nonsense here would size every pool wrongly."""
    assert 2**26 < free_memory(loaded.device) < 2**50
