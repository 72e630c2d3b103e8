"""Fused decoder layers against the models' own."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import LlamaConfig, Ministral3Config

from tests.support.in_process import Answer, InProcess
from tests.support.loading import load
from tests.support.runners import unfuse_model
from tests.support.tiny_models import SERVED, build, gemma3, llama, olmo2, phi3, qwen3, smollm3
from worker.cpu_layers.decoder_layer import FusedLayer
from worker.cpu_layers.fusing import fuse_model, tried_positions

# what is not built like llama: learned positions, LayerNorm, experts, attention beside the MLP
UNLIKE = {"gpt2", "gpt_oss", "cohere2", "phimoe"}
MAX_TOKENS = [4, 2, 4, 3, 2, 3]
CHUNKED = {"max_batch_tokens": 29, "max_requests": 8}


def fused_layers(model) -> list[FusedLayer]:
    forwards = (vars(module).get("forward") for module in model.modules())
    return [forward for forward in forwards if isinstance(forward, FusedLayer)]


def num_fused(model) -> int:
    return len(fused_layers(model))


def num_stacked(model) -> int:
    return sum(layer.stack is not None for layer in fused_layers(model))


def answers(it, prompts) -> list[Answer]:
    return it.answers(prompts, MAX_TOKENS, stagger=1)


@pytest.mark.parametrize("family", SERVED)
def test_fused_and_plain_give_the_same_tokens(served, prompts, family):
    """The twin of every family: biases, norms of heads, partial rotary embedding, none at all,
    norms on both sides. And the families that should be fused are, or speed goes unnoticed."""
    fused, plain = (served(SERVED[family], **CHUNKED) for _ in range(2))
    layers = plain.loaded.geometry.num_layers
    assert num_fused(fused.loaded.model) == num_stacked(fused.loaded.model)
    assert num_fused(fused.loaded.model) == (0 if family in UNLIKE else layers)
    unfuse_model(plain.loaded.model)
    assert num_fused(plain.loaded.model) == 0
    for one, other in zip(answers(fused, prompts), answers(plain, prompts), strict=True):
        assert one.tokens == other.tokens
        assert (one.logits - other.logits).abs().max() < 1e-3 * other.logits.abs().max()


@pytest.mark.parametrize("weight_format", ["float16", "int8"])
@pytest.mark.parametrize("make", [llama, qwen3, phi3, olmo2, gemma3])
def test_other_weight_formats_are_fused_too(served, prompts, make, weight_format):
    """int8 quantises activations before each product, once for layers that share an input. There
    a rounding error may put one on the other side of half a step, which later layers see."""
    fused, plain = (served(make, weight_format=weight_format, **CHUNKED) for _ in range(2))
    assert num_fused(fused.loaded.model) == plain.loaded.geometry.num_layers
    unfuse_model(plain.loaded.model)
    one, other = answers(fused, prompts)[4], answers(plain, prompts)[4]
    limit = 5e-3
    assert (one.logits[0] - other.logits[0]).abs().max() < limit * other.logits[0].abs().max()


@pytest.mark.parametrize("in_blocks4", [{"k_proj"}, {"q_proj", "v_proj"}, {"v_proj", "gate_proj"}])
def test_int8_layers_over_one_input_may_differ_in_what_they_make_of_it(
    tmp_path, prompts, in_blocks4
):
    """GGUF files mix blocks of 4 and 8 bits within a layer: one of q, k and v takes activations of
    8 bits and another of 16, and neither may read what was prepared for the other."""
    wide = LlamaConfig(**{**llama().to_dict(), "hidden_size": 96, "head_dim": 16})
    model = build(wide)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in in_blocks4:
            codes = torch.randint(16, module.weight.shape)
            codes[:, ::32], codes[:, 1::32] = 0, 15  # a block's least and largest
            module.weight.data = (codes - 7) * 2.0**-7
    model.save_pretrained(tmp_path)
    found = []
    for is_fused in (True, False):
        loaded = load(tmp_path, weight_format="int8")
        assert num_fused(loaded.model) == loaded.geometry.num_layers
        attention = loaded.model.base_model.layers[0].self_attn
        storages = {name: layer.storage for name, layer in attention.named_children()}
        assert {name for name in storages if storages[name] == "blocks4"} == in_blocks4 - {
            "gate_proj"
        }
        if not is_fused:
            unfuse_model(loaded.model)
        found.append(answers(InProcess(loaded, **CHUNKED), prompts)[4].logits[0])
    one, other = found
    assert (one - other).abs().max() < 5e-3 * other.abs().max()


def test_unpacked_models_stay_plain(served):
    """`unpacked` asks for the model's own layers, whatever they are."""
    assert num_fused(served(llama, weight_format="unpacked").loaded.model) == 0


@pytest.mark.parametrize("make", [llama, smollm3])
def test_a_layer_that_computes_something_else_is_left_alone(saved, caplog, monkeypatch, make):
    """A model may scale, clamp or reorder where names and shapes do not show it: such a layer must
    keep its own forward, and the log must say so."""
    loaded = load(saved(make)[0])
    unfuse_model(loaded.model)
    mlp = loaded.model.base_model.layers[1].mlp
    own = type(mlp).forward
    monkeypatch.setattr(mlp, "forward", lambda x: own(mlp, x) * 1.01)
    with caplog.at_level(logging.INFO, "worker.cpu_layers.fusing"):
        assert fuse_model(loaded.model, loaded.geometry, loaded.max_model_len) == 2
    assert "1 layers" in caplog.text
    assert "its output would differ" in caplog.text
    assert num_fused(loaded.model) == 2


def scales_queries_by_position() -> Ministral3Config:
    """From position 32 on queries grow with the logarithm of the position."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "llama_4_scaling_beta": 0.5,
    }
    shape = {key: llama().to_dict()[key] for key in ("vocab_size", "hidden_size")}
    return Ministral3Config(
        **shape,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rope_parameters=rope,
        sliding_window=None,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )


def test_a_scale_that_depends_on_the_position_is_kept(served, saved):
    """At the first positions such a model is like any other; fused, it would answer wrongly from
    its original length on. Where that is never reached, it may be fused."""
    it = served(scales_queries_by_position, **CHUNKED)
    assert num_fused(it.loaded.model) == 0
    prompt = list(range(100))
    (answer,) = it.answers([prompt], [1])
    with torch.inference_mode():
        right = saved(scales_queries_by_position)[1](torch.tensor([prompt])).logits[0, -1]
    assert (answer.logits[0] - right).abs().max() < 1e-3 * right.abs().max()
    assert num_fused(served(scales_queries_by_position, max_model_len=32).loaded.model) == 2


CHANGES = {
    "late positions": lambda x, positions: x * (1 + 0.1 * (positions > 200)),
    "the last position": lambda x, positions: x * (1 + 0.1 * (positions == 255)),
    "around a window": lambda x, positions: x * (1 + 0.1 * (positions == 13)),
    "one token alone": lambda x, _: x * 1.1 if x.shape[1] == 1 else x,
    "many tokens": lambda x, _: x * 1.1 if x.shape[1] > 8 else x,
    "the largest of the batch": lambda x, _: x / x.abs().max() * 3,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_the_proof_looks_where_a_layer_could_differ(saved, monkeypatch, change):
    """Each of these is equal at a few first positions or for a few tokens, and another model."""
    loaded = load(saved(phi3)[0])
    unfuse_model(loaded.model)
    layer = loaded.model.base_model.layers[1]
    own = type(layer.self_attn).forward

    def forward(hidden_states, position_ids, **others):
        changed = change(hidden_states, position_ids[..., None])
        return own(layer.self_attn, changed, position_ids=position_ids, **others)

    monkeypatch.setattr(layer.self_attn, "forward", forward)
    assert fuse_model(loaded.model, loaded.geometry, loaded.max_model_len) == 2


def test_a_layer_that_is_handed_more_than_a_fused_one_takes_is_left_alone(
    saved, monkeypatch, caplog
):
    """A keyword that the fused layer does not know may change what the model's own computes."""
    loaded = load(saved(llama)[0])
    unfuse_model(loaded.model)
    layer = loaded.model.base_model.layers[1]
    own = layer.forward
    hand = lambda module, args, kwargs: (args, {**kwargs, "per_layer_input": torch.ones(1)})  # noqa: E731
    monkeypatch.setattr(layer, "forward", lambda x, per_layer_input, **others: own(x, **others))
    layer.register_forward_pre_hook(hand, with_kwargs=True, prepend=True)
    with caplog.at_level(logging.INFO, "worker.cpu_layers.fusing"):
        assert fuse_model(loaded.model, loaded.geometry, loaded.max_model_len) == 2
    assert "it receives per_layer_input" in caplog.text


def test_a_scaling_of_attention_that_depends_on_the_tokens_is_left_alone(saved, monkeypatch):
    """The fused layer asks the same of its attention in every step."""
    loaded = load(saved(llama)[0])
    unfuse_model(loaded.model)
    attention = loaded.model.base_model.layers[1].self_attn
    own = type(attention).forward

    def forward(hidden_states, **others):
        attention.scaling = 0.1 * hidden_states.shape[1]
        return own(attention, hidden_states, **others)

    monkeypatch.setattr(attention, "forward", forward)
    assert fuse_model(loaded.model, loaded.geometry, loaded.max_model_len) == 2


def test_a_fused_layer_takes_no_unknown_arguments(served):
    """What a model hands on only in some steps must not be dropped either."""
    layer = fused_layers(served(llama).loaded.model)[0]
    with pytest.raises(TypeError, match="does not support router_bias"):
        layer(torch.zeros(1, 1, 48), router_bias=torch.ones(1), use_cache=False)


def test_tried_positions():
    """Both sides of each length that a configuration names, and never one that is not served."""
    rope = {"original_max_position_embeddings": 32, "rope_theta": 1e4}
    config = {"sliding_window": 13, "rope_parameters": rope, "hidden_size": 48, "floor_scale": None}
    found = tried_positions(config, 100)
    assert {0, 1, 2, 3, 4, 12, 13, 14, 31, 32, 33, 98, 99} <= set(found)
    assert found == sorted(set(found))
    assert 48 not in found
    assert max(tried_positions(config, 20)) == 19
    assert tried_positions({}, 1) == [0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_values_stay_what_they_are(served, value):
    """The worker finds a broken request by its hidden states: norms and activations must let NaN
    and infinities through, and only into their own row."""
    it = served(llama)
    it.loaded.model.get_input_embeddings().weight.data[6, 3] = value
    assert it.step(it.first_plan([5, 6, 7], [5, 7])).is_finite.tolist() == [0, 1]
