"""`deterministic`: the same bits alone, in any batch, and in any chunks."""

from __future__ import annotations

import pytest
import torch
from transformers import DbrxConfig, MixtralConfig

from tests.support.loading import configure, load
from tests.support.plan_builder import blocks_of
from tests.support.tiny_models import cohere2, gemma3, gpt2, llama, phimoe, wide_llama
from worker.cpu_layers.deterministic import RowBits, check_dense, check_layer_bits, check_row_bits
from worker.kv.geometry import UnsupportedModel
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
        (cohere2, 2, "float32"),  # packed, but not fused: activations are torch's
    ],
)
def test_logits_are_bitwise_equal_alone_batched_and_chunked(
    served, prompts, make, num_threads, weight_format
):
    """The promise itself: every logit of six requests, alone and whole
    against staggered, chunked, mixed. One kernel that takes another path breaks it."""
    settings = {
        "deterministic": True,
        "num_threads": num_threads,
        "page_size": 16,
        "weight_format": weight_format,
    }
    it, alone = served(make, **settings), []
    for prompt, count in zip(prompts, MAX_TOKENS, strict=True):
        alone += it.answers([prompt], [count])
    for chunk, stagger in ((48, 1), (7, 0)):
        it = served(make, max_batch_tokens=chunk, max_requests=7, **settings)
        together = it.answers(prompts, MAX_TOKENS, stagger)
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
    it.answers([[5, 6, 7, 8, 9]], [2])
    assert rows == right


def test_a_matrix_product_that_depends_on_its_rows_is_refused(served, monkeypatch):
    """Another CPU or library may choose its kernels otherwise: then nothing must be promised."""
    it = served(llama)
    layer = it.loaded.model.lm_head
    exact = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x: exact(x) * (1 + 1e-7 * (len(x) > 4)))
    with pytest.raises(ValueError, match=r"the bits of lm_head"):
        check_row_bits(it.loaded.model, 4)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "function",
    [
        torch.nn.functional.silu,
        torch.nn.functional.gelu,
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        torch.nn.functional.mish,
        torch.nn.functional.elu,
        lambda x: torch.nn.functional.softplus(x, beta=2.0),
        lambda x: x.clone().sigmoid_(),
        torch.tanh,
    ],
)
def test_an_activation_gives_a_row_the_same_bits_in_any_batch(function, threads):
    """torch computes the end of an array, and of each thread's share, by other code."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = 3 * torch.randn(417, 100, generator=torch.Generator().manual_seed(3))
        with RowBits():
            together = function(x)
            alone = torch.cat([function(row) for row in x.split(1)])
            turned = function(x.T.contiguous().T)
        torch.testing.assert_close(together, function(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, alone)
    assert torch.equal(turned, alone)


def by_the_batch(x: torch.Tensor) -> torch.Tensor:
    """Other bits at the end of an array."""
    changed = x.clone()
    changed.view(-1)[-1] *= 1 + 1e-6
    return changed


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("model.layers.2.mlp.act_fn", r"model\.layers\.2\.mlp\.act_fn"),
        ("model.layers.2.mlp", r"model\.layers\.2\.mlp"),
        ("model.layers.2.input_layernorm", r"model\.layers\.2\.input_layernorm"),
        ("model.layers.2.self_attn", r"model\.layers\.2\.self_attn"),
        ("model.norm", "the logits"),
    ],
)
def test_whatever_depends_on_the_batch_is_refused_by_name(served, monkeypatch, path, named):
    """Linear layers are not all that a model computes; here a layer of another kind than the first
    ones does something of its own."""
    model = served(llama, weight_format="unpacked").loaded.model
    module = model.get_submodule(path)
    module.of_another_kind = True
    own = module.forward

    def forward(*args, **kwargs):
        output = own(*args, **kwargs)
        if isinstance(output, tuple):
            return by_the_batch(output[0]), *output[1:]
        return by_the_batch(output)

    check_layer_bits(model, 4, 256, 256)
    monkeypatch.setattr(module, "forward", forward)
    with pytest.raises(UnsupportedModel, match=rf"^llama: .* the bits of {named} change when 4 "):
        check_layer_bits(model, 4, 256, 256)


def test_shares_of_threads_are_tried(served, monkeypatch):
    """A function that is wrong only where another thread's share begins."""
    model = served(cohere2, num_threads=2).loaded.model
    activation = model.model.layers[0].mlp.act_fn
    own = activation.forward
    monkeypatch.setattr(
        activation, "forward", lambda x: by_the_batch(own(x)) if x.numel() > 2**15 else own(x)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(UnsupportedModel, match=r"act_fn change when 1 rows .* with 2 threads"):
            check_layer_bits(model, 1, 256, 2048)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (DbrxConfig(ffn_config={"moe_num_experts": 4}), "moe_num_experts is 4"),
        (MixtralConfig(), "num_local_experts is 8"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_experts_are_found_wherever_the_configuration_counts_them(config, named):
    """A number of experts in a part of the configuration went unseen."""
    with pytest.raises(UnsupportedModel, match=named):
        check_dense(config)


def test_experts_are_found_in_the_model(served):
    """A family may call its number of experts by any name."""
    model = served(phimoe).loaded.model
    with pytest.raises(UnsupportedModel, match=r"needs a dense model; model\.layers\.0\.\w+"):
        check_dense(llama(), model)
    for make in (llama, cohere2, gpt2, gemma3):
        check_dense(make(), served(make).loaded.model)


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
        Runner(loaded, configure(**settings), 8)


def test_refused_without_a_compiler(saved, monkeypatch, tmp_path):
    """The reference backend's bits depend on the batch, so it cannot stand in here."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path))
    loaded = load(saved(llama)[0])
    with pytest.raises(ValueError, match="no C compiler"):
        Runner(loaded, configure(deterministic=True), 8)


def test_padding_never_touches_a_request(served):
    """Padding must write into its reserved chunk only, and read nothing but zeros."""
    it = served(llama, deterministic=True, weight_format="unpacked")
    plan = it.first_plan([5, 6, 7])
    it.step(plan)
    written = it.runner.pool.blocks(0).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert written == [1, *blocks_of(plan, plan.rows[0])]
