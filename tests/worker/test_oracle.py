"""Our paged, ragged, chunked forward against transformers' own `generate`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.in_process import InProcess
from tests.support.loading import load
from tests.support.oracle import generate
from tests.support.tiny_models import SERVED, cohere2, gemma2, gemma3, gpt_oss, llama, phi3, qwen3
from worker.kv.geometry import FULL_ATTENTION, CacheGeometry

MAX_TOKENS = [12, 3, 9, 12, 6, 10]


@pytest.fixture(scope="module")
def generated(saved):
    """The answers of transformers, computed once per family."""
    known = {}

    def find(make, prompts):
        if make.__name__ not in known:
            model = saved(make)[1]
            answers = [generate(model, p, n) for p, n in zip(prompts, MAX_TOKENS, strict=True)]
            # else the comparison would prove little
            assert len({token for answer in answers for token in answer}) > 10
            known[make.__name__] = answers
        return known[make.__name__]

    return find


@pytest.fixture
def expected(generated, prompts, request):
    make = SERVED[request.param] if isinstance(request.param, str) else request.param
    return make, generated(make, prompts)


@pytest.mark.parametrize("expected", list(SERVED), indirect=True)
def test_tokens_equal_generate_alone_and_in_mixed_batches(expected, served, prompts):
    """Guards the whole forward: positions, slots, tables, chunk borders, logits rows, and each
    family's window, scaling, softcap and sinks. Any of them wrong changes a token. Prompts end
    before, at and behind the window's edge, and chunks cross it."""
    make, answers = expected
    alone = served(make)
    for prompt, count, answer in zip(prompts, MAX_TOKENS, answers, strict=True):
        assert alone.answers([prompt], [count])[0].tokens == answer
    mixed = served(make, max_batch_tokens=13, max_requests=8)
    found = mixed.answers(prompts, MAX_TOKENS, stagger=2)
    assert [answer.tokens for answer in found] == answers


@pytest.mark.parametrize("expected", [llama], indirect=True)
@pytest.mark.parametrize("settings", [{"attention": "reference"}, {"page_size": 16}], ids=str)
def test_other_backend_and_page_size_give_the_same_tokens(expected, served, prompts, settings):
    """Guards the twin of the C kernel, and page sizes that prompts do not fill."""
    make, answers = expected
    it = served(make, max_batch_tokens=9, max_requests=8, **settings)
    found = it.answers(prompts, MAX_TOKENS, stagger=1)
    assert [answer.tokens for answer in found] == answers


@pytest.mark.parametrize("expected", [phi3, gemma2, gpt_oss], indirect=True)
def test_the_reference_backend_keeps_windows_softcap_and_sinks(expected, served, prompts):
    """The twin of the C kernel for what only these families have."""
    make, answers = expected
    it = served(make, attention="reference", max_batch_tokens=11, max_requests=8)
    found = it.answers(prompts, MAX_TOKENS, stagger=1)
    assert [answer.tokens for answer in found] == answers


def each_layer_alone(geometry: CacheGeometry) -> CacheGeometry:
    return geometry.fitted(1)


def with_an_idle_slot(geometry: CacheGeometry) -> CacheGeometry:
    """The last slot of every sliding block is used by no layer."""
    full, sliding = geometry.groups
    assert full.kind == FULL_ATTENTION
    num_slots = sliding.num_slots + 1
    return replace(
        geometry,
        groups=(
            replace(full, blocks_per_chunk=num_slots),
            replace(sliding, blocks_per_chunk=full.num_slots, num_unused_slots=1),
        ),
    )


@pytest.mark.parametrize("expected", [gemma3, cohere2], indirect=True)
@pytest.mark.parametrize("change", [each_layer_alone, with_an_idle_slot])
def test_other_groups_give_the_same_tokens(expected, saved, prompts, change):
    """How layers are split into groups is a matter of memory alone: each layer must find its
    group's table and its place in the block."""
    make, answers = expected
    loaded = load(saved(make)[0])
    loaded = replace(loaded, geometry=change(loaded.geometry))
    it = InProcess(loaded, chunks=1200, max_batch_tokens=13)
    found = it.answers(prompts, MAX_TOKENS, stagger=2)
    assert [answer.tokens for answer in found] == answers


@pytest.mark.parametrize("expected", [qwen3, gemma3], indirect=True)
def test_sampled_tokens_stay_on_the_device(expected, served, prompts):
    """Run-ahead plans a token before it is known: the runner must fill in its row's last one."""
    make, answers = expected
    it = served(make, depth=2, max_batch_tokens=20, max_requests=8)
    found = it.answers(prompts, MAX_TOKENS, stagger=2)
    assert [answer.tokens for answer in found] == answers


def test_float64_reference_equals_transformers_in_float64(saved, prompts):
    """Guards the oracle itself: in float64 no rounding can hide a key too many or too few."""
    path, _ = saved(llama)
    loaded = load(path, weight_format="unpacked")  # packed layers are float32 alone
    wide = replace(
        loaded,
        model=loaded.model.double(),
        dtype=torch.float64,
        kv_dtype=torch.float64,
        geometry=replace(loaded.geometry, itemsize=8),
    )
    it = InProcess(wide, attention="reference", max_batch_tokens=17)
    answer = it.answers([prompts[4]], [1])[0]
    wide.model.set_attn_implementation("eager")
    with torch.inference_mode():
        direct = wide.model(torch.tensor([prompts[4]])).logits[0, -1].float()
    assert (answer.logits[0] - direct).abs().max() < 1e-5 * direct.abs().max()
