"""`deterministic`: the same bits alone, in any batch, and in any chunks."""

from __future__ import annotations

import pytest
import torch

from tests.worker.conftest import configure, load
from tests.worker.planner import GreedySample, Planner, serve
from tests.worker.tiny_models import gemma3, gpt2, llama, wide_llama
from worker.model_check import check_row_bits
from worker.runner import Runner

MAX_TOKENS = [3, 2, 3, 2, 2, 3]


@pytest.mark.parametrize(
    ("make", "num_threads", "weight_format"),
    [
        (wide_llama, 1, "float32"),
        (wide_llama, 2, "unpacked"),
        (wide_llama, 2, "int8"),
        (gpt2, 1, "unpacked"),
        (gemma3, 2, "float16"),
    ],
)
def test_logits_are_bitwise_equal_alone_batched_and_chunked(
    served, prompts, make, num_threads, weight_format
):
    """The promise itself (worker notes, section 9): every logit of six requests, alone and whole
    against staggered, chunked, mixed. One kernel that takes another path breaks it."""
    settings = {
        "deterministic": True,
        "num_threads": num_threads,
        "page_size": 16,
        "weight_format": weight_format,
    }
    alone = []
    for prompt, count in zip(prompts, MAX_TOKENS, strict=True):
        it = served(make, **settings)
        alone += serve(it.runner, it.planner, it.sample, [prompt], [count])
    for chunk, stagger in ((48, 1), (7, 0)):
        it = served(make, **settings)
        together = serve(
            it.runner, it.planner, it.sample, prompts, MAX_TOKENS, chunk=chunk, stagger=stagger
        )
        for one, other in zip(alone, together, strict=True):
            assert one.tokens == other.tokens
            assert torch.equal(one.logits, other.logits)


@pytest.mark.parametrize(
    ("weight_format", "right"), [("unpacked", [8, 4, 4, 4]), ("float32", [5, 1, 1, 1])]
)
def test_unpacked_rows_are_padded_to_multiples_of_four(served, weight_format, right):
    """A thread's share of fewer than four rows takes another path through torch's matrix
    products, with other bits: five rows on two threads are four and one. Packed layers have one
    path, and padding them would be waste."""
    rows = []
    it = served(llama, deterministic=True, weight_format=weight_format)
    it.loaded.model.base_model.register_forward_hook(
        lambda _module, _inputs, output: rows.append(output[0].shape[1])
    )
    it.loaded.model.lm_head.register_forward_hook(
        lambda _module, _inputs, output: rows.append(output.shape[1])
    )
    serve(it.runner, it.planner, it.sample, [[5, 6, 7, 8, 9]], [2])
    assert rows == right


def test_a_matrix_product_that_depends_on_its_rows_is_refused(served, monkeypatch):
    """Another CPU or library may choose its kernels otherwise: then nothing must be promised."""
    it = served(llama)
    layer = it.loaded.model.lm_head
    exact = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x: exact(x) * (1 + 1e-7 * (len(x) > 4)))
    with pytest.raises(ValueError, match=r"the bits of lm_head"):
        check_row_bits(it.loaded.model, 4)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dtype": "bfloat16"}, "float32 on the CPU"),
        ({"attention": "reference"}, "C attention kernel"),
    ],
    ids=str,
)
def test_refused_where_it_cannot_be_promised(saved, settings, reason):
    """A promise that cannot be kept must not be given silently."""
    settings["deterministic"] = True
    loaded = load(saved(llama)[0], **settings)
    with pytest.raises(ValueError, match=reason):
        Runner(loaded, configure(**settings), 8, GreedySample())


def test_refused_without_a_compiler(saved, monkeypatch, tmp_path):
    """The reference backend's bits depend on the batch, so it cannot stand in here."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path))
    loaded = load(saved(llama)[0])
    with pytest.raises(ValueError, match="no C compiler"):
        Runner(loaded, configure(deterministic=True), 8, GreedySample())


def test_padding_never_touches_a_request(served):
    """Padding must write into its reserved chunk only, and read nothing but zeros."""
    it = served(llama, deterministic=True, weight_format="unpacked")
    planner: Planner = it.planner
    serve(it.runner, planner, it.sample, [[5, 6, 7]], [1])
    pool = it.runner.pool.blocks(0)
    assert not pool[0].any()
    assert pool[1].any()
    assert not pool[planner.free[:-1]].any()
