"""longrope pinned to one length: the same as transformers there, and blind to neighbours."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PhimoeConfig

from tests.support.oracle import generate
from tests.support.tiny_models import build, phi3_longrope, phimoe
from worker.kv.geometry import UnsupportedModel
from worker.model.rope import pin_longrope

SHORT = 64  # original_max_position_embeddings of phi3_longrope


@pytest.mark.parametrize("max_model_len", [SHORT, SHORT + 1, 256])
def test_tokens_equal_generate_at_that_length(saved, served, prompts, max_model_len):
    """The set of frequencies, and the scaling that goes with it, follow max_model_len alone:
    prompts on the same side of the original length answer as in transformers, in mixed batches."""
    model = saved(phi3_longrope)[1]
    is_short = max_model_len <= SHORT
    those = [p for p in prompts if len(p) + 6 <= max_model_len and (len(p) < SHORT) == is_short]
    those += [] if is_short or max_model_len < 200 else [those[0][:90]]
    it = served(phi3_longrope, max_model_len=max_model_len, max_batch_tokens=13, max_requests=8)
    if not those:  # 65 tokens: the long set, by comparison with a longer request
        pinned = it.loaded.model.model.rotary_emb.inv_freq
        longer = served(phi3_longrope, max_model_len=256).loaded.model.model.rotary_emb.inv_freq
        assert torch.equal(pinned, longer)
        return
    answers = [generate(model, prompt, 6) for prompt in those]
    found = it.answers(those, [6] * len(those), stagger=1)
    assert [answer.tokens for answer in found] == answers


def test_a_short_request_does_not_change_beside_a_long_one(served, prompts):
    """The reason for pinning: transformers' choice follows the longest of the flat batch."""
    expected = served(phi3_longrope).answers([prompts[2]], [8])[0]
    beside = served(phi3_longrope).answers([prompts[2], prompts[5]], [8, 8])[0]
    assert beside.tokens == expected.tokens
    assert torch.allclose(beside.logits, expected.logits, atol=1e-4)


def test_frequencies_of_one_layer_type():
    """Hybrid models have a set per type: only the one that is longrope is pinned."""
    factors = {"short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [2.0, 4.0, 6.0, 8.0]}
    config = Gemma3TextConfig(
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=7,
        max_position_embeddings=256,
        pad_token_id=None,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
                **factors,
            },
        },
    )
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    rotary = model.model.rotary_emb
    sliding, full = (
        rotary.sliding_attention_inv_freq.clone(),
        rotary.full_attention_inv_freq.clone(),
    )
    pin_longrope(model, 200)
    assert torch.equal(rotary.sliding_attention_inv_freq, sliding)
    ratio = full / rotary.full_attention_inv_freq
    assert torch.allclose(ratio, torch.tensor(factors["long_factor"]))


def test_an_embedding_that_cannot_be_pinned_is_refused():
    """phimoe scales by the longest position in code of its own; pinned frequencies alone would
    leave its requests depending on one another."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "short_mscale": 1.25,
        "long_mscale": 1.5,
        "original_max_position_embeddings": 64,
    }
    config: PhimoeConfig = phimoe()
    config.rope_parameters = rope
    with pytest.raises(UnsupportedModel, match=r"phimoe: its longrope .* cannot be pinned"):
        pin_longrope(build(config), 200)
