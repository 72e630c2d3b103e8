"""What is seen of a loaded model, and what is refused for it."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    Gemma3nTextConfig,
    JetMoeConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    masking_utils,
)

from tests.support import tiny_models
from worker.attention.interface import (
    ATTENTION_NAME,
    UnservedAttention,
    answering,
    chairlift_paged,
    register,
)
from worker.cpu_layers.packing import pack_model
from worker.kv.geometry import LayerShape, UnsupportedModel
from worker.model.adapters import place_positions
from worker.model.probe import check_step, observe
from worker.model.watching import _window_of


def _built(config, seed=0):
    """Under our attention, with weights whose effects show."""
    register()
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=ATTENTION_NAME
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def _llama(**more):
    return LlamaConfig(**{**tiny_models.llama().to_dict(), "num_hidden_layers": 2, **more})


def test_geometry_follows_what_layers_ask_for():
    """JetMoe has as many query heads as experts are taken for each KV head: a pool by its
    configuration would be written out of bounds."""
    config = JetMoeConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_key_value_heads=2, kv_channels=4,
        intermediate_size=8, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    observed = observe(_built(config), 64)
    assert observed.layers == (LayerShape(4, 4, 4, 0),) * 2
    assert observed.vocab_size == 50


def test_windows_of_any_size_are_seen_in_three_tokens():
    """A window is not believed but asked for, at positions around it, and no long prompt is run."""
    model = _built(MistralConfig(**{**tiny_models.mistral().to_dict(), "sliding_window": 40_000}))
    assert {layer.sliding_window for layer in observe(model, 100_000).layers} == {40_000}
    assert {layer.sliding_window for layer in observe(model, 40_000).layers} == {0}  # never crossed


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        (masking_utils.causal_mask_function, 0),
        (masking_utils.sliding_window_causal_mask_function(7), 7),
        (masking_utils.sliding_window_causal_mask_function(1), 1),
        (masking_utils.sliding_window_causal_mask_function(64), 0),
        (masking_utils.chunked_causal_mask_function(7, torch.zeros(1, dtype=int)), "neither"),
        (masking_utils.chunked_causal_mask_function(32, torch.zeros(1, dtype=int)), "neither"),
        (masking_utils.bidirectional_mask_function, "not causal"),
        (masking_utils.sliding_window_bidirectional_mask_function(9), "not causal"),
    ],
)
def test_rules_of_masks(rule, found):
    """A mask that is taken for another one gives other tokens, silently."""
    window = _window_of(rule, 64, 3)
    assert window == found if isinstance(found, int) else found in window


@pytest.mark.parametrize(("blocks", "found"), [([-1, -1, -1], None), ([0, 0, -1], "not causal")])
def test_rules_that_know_the_forwards_own_tokens_only(blocks, found):
    """Gemma 4's image tokens see each other; which ones they are is looked up per token."""
    overlay = masking_utils.blockwise_overlay(torch.tensor([blocks]))
    window = _window_of(masking_utils.or_masks(masking_utils.causal_mask_function, overlay), 64, 3)
    assert window is found or found in window


def test_a_window_that_the_model_does_not_apply_is_refused():
    """Moshi names a window and attends to everything: transformers' own cache would cut its keys
    off, ours its answers. A window that no request can cross is no contradiction."""
    config = _llama()
    config.sliding_window = 13
    model = _built(config)
    with pytest.raises(UnsupportedModel, match="promises layer 0 a window of 13 tokens, but"):
        observe(model, 64)
    assert observe(model, 13).layers[0].sliding_window == 0


def test_a_window_in_the_call_that_the_mask_does_not_have_is_refused():
    """Which of the two the model was trained with cannot be known."""
    model = _built(tiny_models.qwen2_windowed())
    model.model.layers[0].self_attn.sliding_window = 5
    with pytest.raises(UnsupportedModel, match=r"layer 0 .* window of 5 tokens.* full attention"):
        observe(model, 64)


def test_models_that_fail_are_refused_by_name(monkeypatch):
    """Whatever a foreign model raises, the message names the model and the error."""
    model = _built(tiny_models.gpt2())
    monkeypatch.setattr(model.transformer.h[1], "forward", lambda *_, **__: {}["position"])
    with pytest.raises(UnsupportedModel, match=r"gpt2: a forward .* KeyError: 'position'"):
        observe(model, 64)


def test_a_layer_that_is_passed_over_is_refused(monkeypatch):
    """Layers without attention keep something else from token to token, which nobody pages."""
    model = _built(_llama())
    monkeypatch.setattr(model.model.layers[1], "forward", lambda hidden, *_, **__: hidden)
    with pytest.raises(UnsupportedModel, match=r"has 2 hidden layers, .* was called 1 times"):
        observe(model, 64)


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x.roll(1, dims=1),
        lambda x: x.mean(dim=1, keepdim=True),
        lambda x: x / x.amax(dim=1, keepdim=True),
    ],
    ids=["the token before", "the mean of a step", "the largest of a step"],
)
def test_a_model_that_mixes_tokens_is_refused(monkeypatch, mixed):
    """A convolution over the flat sequence of a step would mix one request with another; so would
    whatever is taken over the whole step."""
    model = _built(_llama())
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda x: forward(x) + mixed(x))
    with pytest.raises(UnsupportedModel, match="mixes the tokens of a step outside of attention"):
        check_step(model, observe(model, 64), 64)


def test_columns_that_are_switched_off_are_no_obstacle(monkeypatch):
    """Some models give -inf to columns of the vocabulary that stand for nothing."""
    model = _built(_llama())
    forward = model.lm_head.forward

    def switched_off(x: torch.Tensor) -> torch.Tensor:
        logits = forward(x)
        logits[..., -2:] = -torch.inf
        return logits

    monkeypatch.setattr(model.lm_head, "forward", switched_off)
    check_step(model, observe(model, 64), 64)
    monkeypatch.setattr(model.lm_head, "forward", lambda x: forward(x) * torch.nan)
    with pytest.raises(UnsupportedModel, match="its logits are not finite in float32"):
        check_step(model, observe(model, 64), 64)


def _bart():
    return BartConfig(
        vocab_size=60, d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=20,
        encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=20,
        max_position_embeddings=64, is_decoder=True, is_encoder_decoder=False,
    )  # fmt: skip


def test_positions_that_a_model_counts_itself():
    """Bart's relatives number the tokens of a forward from 0: the second request of a step would
    stand where the first one ends."""
    model = _built(_bart())
    with pytest.raises(UnsupportedModel, match="or does not follow position_ids"):
        check_step(model, observe(model, 64), 64)
    place_positions(model)
    check_step(model, observe(model, 64), 64)


def test_hidden_states_are_found_where_the_forward_passes():
    """OPT and Bart call the decoder inside of their base model, which a hook would wait for in
    vain: the model would be ready, and every request would fail."""
    config = OPTConfig(
        vocab_size=60, hidden_size=16, ffn_dim=20, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, word_embed_proj_dim=16,
    )  # fmt: skip
    model = _built(config)
    assert observe(model, 64).hidden_states is model.model.decoder
    model = _built(_llama())
    assert observe(model, 64).hidden_states is model.model


def test_layers_that_share_keys_and_values():
    """One place in the pool serves both; a copy for each would be right, and larger."""
    config = Gemma3nTextConfig(
        vocab_size=50, vocab_size_per_layer_input=50, hidden_size=16, intermediate_size=20,
        num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        hidden_size_per_layer_input=4, num_kv_shared_layers=2, sliding_window=9, laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    model = _built(config)
    assert observe(model, 64).shared_layers == {2: 0, 3: 1}
    model.config.num_kv_shared_layers = 1
    with pytest.raises(UnsupportedModel, match=r"num_kv_shared_layers is 1, .* 2 layers attend"):
        observe(model, 64)


class _Gate(nn.Module):
    """A router that multiplies by its layer's weight itself."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return nn.functional.linear(x.to(self.linear.weight.dtype), self.linear.weight)


def test_layers_whose_weight_the_model_reads_are_not_packed():
    """A packed layer has no weight to read: hunyuan_v1_moe looks up its router's dtype."""
    model = _built(_llama())
    model.model.layers[0].mlp.up_proj = _Gate(model.model.layers[0].mlp.up_proj)
    observed = observe(model, 64)
    assert observed.read_weights == {model.model.layers[0].mlp.up_proj.linear}
    pack_model(model, "float32", lambda _share: None, observed.read_weights)
    assert type(model.model.layers[0].mlp.up_proj.linear) is nn.Linear
    assert type(model.model.layers[0].mlp.down_proj) is not nn.Linear
    check_step(model, observed, 64)


def test_watching_leaves_the_model_as_it_was():
    """Hooks or masks that stay would cost every step, and change it."""
    model = _built(_llama())
    observe(model, 64)
    for module in model.modules():
        assert not module._forward_hooks
        assert "Watched" not in type(module).__name__
    assert ATTENTION_NAME not in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (
            {"position_bias": torch.zeros(1)},
            "SimpleNamespace passes position_bias to its att",
        ),
        ({"indices": [1]}, "passes indices"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_unknown_arguments_of_attention_are_refused(others, message):
    """Left out, they would change answers without a word."""
    query = torch.zeros(1, 1, 1, 4)
    handler = SimpleNamespace(attend=lambda query, *_: query)
    with answering(handler):
        with pytest.raises(UnservedAttention, match=message):
            chairlift_paged(SimpleNamespace(), query, query, query, None, **others)
        harmless = {"position_bias": None, "dropout": 0.0, "is_causal": True, "use_cache": False}
        chairlift_paged(SimpleNamespace(), query, query, query, None, **harmless)
