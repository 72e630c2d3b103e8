"""What a step changes, what it reports, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from protos.sampling import SAMPLER_FIELDS
from scheduler_svc.core.request import NewRequest, Sampling
from tests.support.loading import configure, load
from tests.support.plan_builder import blocks_of, plan_of, with_samples
from tests.support.tiny_models import llama
from worker.batch.plan_values import InvalidPlan
from worker.runner import Runner


def test_blocks_outside_of_the_plan_stay_byte_identical(served):
    """The one thing that must never happen: a step that writes into another request's KV."""
    it = served(llama, max_batch_tokens=14, max_requests=2)
    blocks = it.runner.pool.blocks(0)
    blocks[2:].copy_(torch.randn(blocks[2:].shape))
    before = blocks.clone()
    plan = it.first_plan([1] * 9, [2] * 6)
    it.step(plan)
    changed = (blocks != before).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert plan.seq_lens.tolist() == [9, 5]
    assert changed == sorted(plan.blocks.tolist())
    # the third page of the first request holds one token: the others of that page are untouched
    last = blocks_of(plan, plan.rows[0])[2]
    assert torch.equal(blocks[last, ..., 1:, :], before[last, ..., 1:, :])


def test_stale_values_in_reused_blocks_do_not_matter(served):
    """Blocks come back with another request's KV, be it NaN: only own tokens may be read."""
    answers = []
    for stale in (0.0, math.nan):
        it = served(llama, max_batch_tokens=3, max_requests=1)
        it.runner.pool.blocks(0)[2:] = stale
        it.core.submit_prompts([5, 6, 7, 8, 9, 10])
        for _ in range(2):
            assert it.next_step()[1].is_finite.tolist() == [1]
        answers.append(it.logits[-1])
    assert torch.equal(*answers)


def test_only_the_row_that_is_not_finite_is_reported(served):
    """One poisoned request must fail alone, sampling or not; its neighbours go on."""
    it = served(llama, deterministic=True, max_batch_tokens=7, max_requests=2, depth=2)
    it.core.submit_prompts([1, 2, 3], range(3, 15), max_tokens=4)
    first, result = it.next_step()
    assert result.is_finite.tolist() == [1, 1]
    it.runner.pool.blocks(0)[blocks_of(first, first.rows[1])[0]] = math.inf
    # in the middle of the prompt, then sampling: both planned before the scheduler is told
    for plan in (it.core.plan(), it.core.plan()):
        assert plan.rows.tolist() == first.rows.tolist()
        assert it.step(plan).is_finite.tolist() == [1, 0]
    assert len(plan.sample_rows) == 2


def test_logits_that_are_not_finite_are_reported(served):
    """Finite hidden states can still overflow in lm_head; -inf in unused columns is no fault."""
    # unpacked: weights can be reached
    it = served(llama, weight_format="unpacked", max_batch_tokens=2, max_requests=1)
    with torch.no_grad():
        it.loaded.model.lm_head.weight[3] = -math.inf
        it.loaded.model.model.embed_tokens.weight[0] = 1.0
    hook = it.loaded.model.lm_head.register_forward_hook(
        lambda _module, _inputs, logits: torch.where(logits.isnan(), -math.inf, logits)
    )
    it.core.submit_prompts([1, 2, 3])
    assert it.next_step()[1].is_finite.tolist() == [1]
    hook.remove()
    it.loaded.model.lm_head.register_forward_hook(lambda _m, _i, logits: logits * math.nan)
    assert it.next_step()[1].is_finite.tolist() == [0]


def test_sampling_parameters_reach_the_sampler(served):
    """The sampler gets float32 logits and the plan's arrays, one entry per sample."""
    it = served(llama, dtype="bfloat16")
    seen = []

    def sample(logits, samples):
        arrays = {**samples.parameters, "u": samples.u}
        seen.append((logits.dtype, logits.shape, {n: a.tolist() for n, a in arrays.items()}))
        return torch.tensor([5, 6])

    it.sample_with(sample)
    result = it.step(
        plan_of(
            token_ids=[1, 2, 3],
            rows=[0, 31],
            query_start_loc=[0, 2, 3],
            seq_lens=[2, 1],
            table_start=[[0, 1, 2]],
            blocks=[2, 3],
            logits_indices=[1, 2],
            sample_logits=[1, 0],
            sample_rows=[31, 0],
            temperature=[0.5, 1],
            top_k=[3, 0],
            top_p=[0.25, 1],
            min_p=[0, 0.125],
            repetition_penalty=[1, 1.5],
            frequency_penalty=[0.25, 0],
            presence_penalty=[-0.5, 0],
            u=[0.5, 0.75],
        )
    )
    assert result.token_ids.tolist() == [5, 6]
    parameters = {
        "temperature": [0.5, 1],
        "top_k": [3, 0],
        "top_p": [0.25, 1],
        "min_p": [0, 0.125],
        "repetition_penalty": [1, 1.5],
        "frequency_penalty": [0.25, 0],
        "presence_penalty": [-0.5, 0],
        "u": [0.5, 0.75],
    }
    assert parameters.keys() == {*SAMPLER_FIELDS, "u"}
    assert seen == [(torch.float32, (2, 211), parameters)]
    assert it.runner._last_token[[0, 31]].tolist() == [6, 5]


def test_logits_are_copied_only_where_samples_need_another_order(served):
    """64 requests of a large vocabulary have megabytes of logits, and nobody needs another copy."""
    it = served(llama)
    given, used = [], []
    it.loaded.model.lm_head.register_forward_hook(
        lambda _module, _inputs, logits: given.append(logits[0])
    )
    it.sample_with(lambda logits, _: used.append(logits) or logits.argmax(dim=-1))
    plan = it.first_plan([1, 2], [4, 5])
    for order in ([0, 1], [1, 0]):
        it.step(with_samples(plan, plan.logits_indices, order, plan.sample_rows[order]))
        assert torch.equal(used[-1], given[-1][order])
        assert (used[-1].data_ptr() == given[-1].data_ptr()) == (order == [0, 1])


def test_ready_tells_what_the_pool_is(saved):
    """The scheduler plans blocks by these numbers; the pool is sized from memory by default."""
    path, _ = saved(llama)
    settings = {"num_blocks": 10, "max_model_len": 50}
    runner = Runner(load(path, **settings), configure(**settings))
    ready = runner.ready()
    assert ready.num_chunks == runner.pool.num_chunks == 12
    assert ready.num_chunks * ready.chunk_bytes == runner.pool.num_bytes
    assert [(g.kind, list(g.layers), g.blocks_per_chunk) for g in ready.groups] == [
        ("full_attention", [0, 1, 2], 1)
    ]
    assert (ready.model_type, ready.architecture) == ("llama", "LlamaForCausalLM")
    assert (ready.vocab_size, ready.max_model_len, ready.page_size) == (211, 50, 4)
    assert (ready.dtype, ready.device, ready.attention) == ("float32", "cpu", "cpu")
    assert ready.kv_cache_dtype == "float32"
    assert ready.model_path == str(path)


def test_a_plan_of_copies_alone_runs_no_forward(served):
    """Pre-ops may come without tokens, and take effect."""
    it = served(llama)
    blocks = it.runner.pool.blocks(0)
    blocks[5] = 1.5
    result = it.step(plan_of(copy=[[0, 5, 8]]))
    assert len(result.token_ids) == len(result.is_finite) == 0
    assert torch.equal(blocks[8], blocks[5])


def test_siblings_are_sampled_from_one_row_of_logits(served):
    """A fork's siblings have computed nothing: they sample from their parent's logits, and go on
    from the token that they drew, which only the device may know yet."""
    it = served(llama, depth=2)
    it.answers([[1], [2], [3]], [2, 3, 1])  # rows come back in no order
    drawn = [[40, 41, 42]]
    it.sample_with(lambda logits, _: torch.tensor(drawn.pop()) if drawn else logits.argmax(dim=-1))
    it.core.submit(NewRequest("n", [5, 6, 7, 8, 9, 10], 2, Sampling(0), n=3))
    fork, decode = it.core.plan(), it.core.plan()
    assert sorted(fork.sample_rows) == [0, 1, 2] != fork.sample_rows.tolist()
    result = it.step(fork)
    assert result.token_ids.tolist() == [40, 41, 42]
    assert result.is_finite.tolist() == [1]
    first = it.logits[-1]
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], first[2])

    assert decode.token_ids.tolist() == [-1, -1, -1]
    assert len(decode.copy) == 2
    it.step(decode)
    from_device = it.logits[-1]
    known = np.array([40, 41, 42], np.int32)
    it.step(replace(decode, copy=decode.copy[:0], token_ids=known))
    assert torch.equal(from_device, it.logits[-1])
    assert not torch.equal(from_device[0], from_device[1])


def test_a_row_has_as_many_samples_as_the_plan_names(served):
    """A chunk in mid-prompt has none; a row whose draft is verified has one for each position, each
    from its own logits, and goes on from the last one."""
    draft, chunk = [5, 6, 7, 8, 9], [1, 2, 3, 4, 5]
    it = served(llama, max_batch_tokens=8, max_requests=4)
    plan = it.first_plan(draft, chunk)
    assert plan.seq_lens.tolist() == [5, 3]
    drawn = torch.tensor([40, 41, 42, 43])
    it.sample_with(lambda *_: drawn)
    result = it.step(with_samples(plan, [1, 2, 3, 4], [0, 1, 2, 3], [plan.rows[0]] * 4))
    assert result.token_ids.tolist() == drawn.tolist()
    assert result.is_finite.tolist() == [1, 1]
    assert it.runner._last_token[plan.rows[0]] == 43
    best = it.logits[-1].argmax(dim=-1).tolist()
    for count in (2, 3, 4, 5):  # of the draft's tokens, as a prompt of its own
        assert served(llama).answers([draft[:count]], [1])[0].tokens == [best[count - 2]]


def test_a_refused_plan_changes_nothing(served):
    """The scheduler soft-resets the step's requests and goes on with the same pool."""
    it = served(llama)
    plan = plan_of(
        copy=[[0, 5, 8]],
        token_ids=[1],
        rows=[0],
        query_start_loc=[0, 1],
        seq_lens=[1],
        table_start=[[0, 1]],
        blocks=[10**6],
    )
    it.runner.pool.blocks(0)[5] = 1.0
    before = it.runner.pool.blocks(0).clone()
    with pytest.raises(InvalidPlan, match="blocks must lie in"):
        it.step(plan)
    assert torch.equal(it.runner.pool.blocks(0), before)


def test_plans_as_they_arrive_are_read_only(served):
    """Arrays of a received plan are views into its message, which nobody may write to."""
    it = served(llama)
    plan = it.first_plan([1, 2, 3])
    for name in type(plan).__dataclass_fields__:
        array = getattr(plan, name)
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    assert it.step(plan).is_finite.tolist() == [1]
