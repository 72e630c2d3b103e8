"""How many chunks fit, and that the plan's numbers are real bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.worker.conftest import configure, load
from tests.worker.tiny_models import llama
from worker.kv_pool import KvPool
from worker.memory import OutOfMemory, free_memory, plan_memory, weight_bytes

MIB = 2**20


@pytest.fixture
def loaded(saved):
    return load(saved(llama)[0])


def test_predicted_bytes_equal_the_tensors(loaded):
    """A prediction that is off by a factor ends in the kernel's out-of-memory killer."""
    plan = plan_memory(loaded, configure(num_blocks=37), "cpu", free=1024 * MIB)
    assert plan.num_chunks == 37 + 2
    assert plan.tokens == 37 * 4
    pool = KvPool(loaded.geometry, plan.num_chunks, loaded.dtype, loaded.device)
    assert plan.pool == pool.num_bytes
    assert plan.weights == sum(p.nbytes for p in loaded.model.parameters()) + sum(
        b.nbytes for b in loaded.model.buffers()
    )


def test_the_pool_takes_what_is_left(loaded):
    """Everything together stays within max_memory_percent of what is free, with less than a chunk
    to spare."""
    long = replace(loaded, max_model_len=10**6)
    settings = configure(max_memory_percent=0.5)
    for attention in ("cpu", "reference"):
        free = 64 * MIB if attention == "cpu" else 4096 * MIB
        plan = plan_memory(long, settings, attention, free)
        used = plan.pool + plan.activations + plan.logits + plan.gathered + plan.inputs
        assert 0 <= free // 2 - used < plan.chunk_bytes


def test_never_more_than_can_be_used(loaded):
    """On a large machine a tiny model must not take half of the memory."""
    plan = plan_memory(loaded, configure(), "cpu", free=10**6 * MIB)
    assert plan.num_chunks == 2 + 16 * 256 // 4


def test_default_share_and_step_costs(loaded):
    """0.6 on the CPU; a second buffer set and longer steps cost memory."""
    plan = plan_memory(loaded, configure(), "cpu", free=1024 * MIB)
    assert plan.percent == 0.6
    double = plan_memory(loaded, configure(use_async_batching=True), "cpu", free=1024 * MIB)
    assert double.inputs == 2 * plan.inputs
    longer = plan_memory(loaded, configure(max_batch_tokens=512), "cpu", free=1024 * MIB)
    assert longer.activations == 2 * plan.activations


@pytest.mark.parametrize("settings", [{"num_blocks": 1000}, {}], ids=["num_blocks", "auto"])
def test_refusal_has_the_numbers(loaded, settings):
    """Who reads it must know what to change, and by how much."""
    with pytest.raises(OutOfMemory, match=r"of 0\.5 MiB free on cpu at 60%.*max_batch_tokens"):
        plan_memory(loaded, configure(**settings), "cpu", free=MIB // 2)


@pytest.mark.parametrize("percent", [-0.1, 1.5])
def test_bad_percent(loaded, percent):
    """A share is a share."""
    with pytest.raises(ValueError, match=f"max_memory_percent is {percent}"):
        plan_memory(loaded, configure(max_memory_percent=percent), "cpu", free=MIB)


def test_table_is_printable(loaded):
    """What the worker logs at start."""
    text = str(plan_memory(loaded, configure(num_blocks=64), "cpu", free=1024 * MIB))
    assert "KV pool" in text
    assert "66 chunks of 0.001 MiB hold 256 tokens" in text
    assert "gathered" not in text


def test_tied_weights_count_once(loaded):
    """lm_head and embeddings of most small models are one tensor."""
    model = loaded.model
    before = weight_bytes(loaded)
    size = model.lm_head.weight.nbytes
    model.lm_head.weight = model.model.embed_tokens.weight
    assert weight_bytes(loaded) == before - size


def test_free_memory_is_asked_of_the_system(loaded):
    """Zero or nonsense here would size every pool wrongly."""
    assert 2**26 < free_memory(loaded.device) < 2**50
