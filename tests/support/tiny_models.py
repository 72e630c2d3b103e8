"""Tiny models with random weights, as folders that any loader can read.

Every parameter is drawn wide enough that greedy answers wander: with transformers' own
initialisation most tiny models repeat one token, and a wrong cache would go unseen. Windows are
far shorter than MAX_LEN, and mostly no multiple of a page: prompts cross their edges.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

VOCAB_SIZE = 211
MAX_LEN = 256
WINDOW = 13
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,  # tied, the last token's own logit is the highest too often
}


def llama() -> PreTrainedConfig:
    return LlamaConfig(**_SHAPE)


def qwen2() -> PreTrainedConfig:
    return Qwen2Config(**_SHAPE)


def qwen3() -> PreTrainedConfig:
    """head_dim differs from hidden_size / heads; q and k have norms."""
    return Qwen3Config(**{**_SHAPE, "head_dim": 16})


def olmo2() -> PreTrainedConfig:
    return Olmo2Config(**{**_SHAPE, "num_key_value_heads": 6})


def gpt2() -> PreTrainedConfig:
    """Learned positions, biases, and a head size of 12: no whole number of vectors."""
    return GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=48,
        n_layer=3,
        n_head=4,
        n_positions=MAX_LEN,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def mistral() -> PreTrainedConfig:
    """All layers slide, by as many tokens as whole pages hold."""
    return MistralConfig(**_SHAPE, sliding_window=16)


def phi3() -> PreTrainedConfig:
    """All layers slide; q, k and v in one matrix, half of a head rotated."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return Phi3Config(**_SHAPE, sliding_window=WINDOW, rope_parameters=rope)


def qwen2_windowed() -> PreTrainedConfig:
    """The layers from max_window_layers on slide."""
    return Qwen2Config(
        **_SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    )


def gemma2() -> PreTrainedConfig:
    """Sliding and full layers in turn, capped scores, a scaling that is not head_dim^-0.5."""
    return Gemma2Config(
        **_SHAPE,
        head_dim=12,
        sliding_window=WINDOW,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=30.0,
    )


def gemma3() -> PreTrainedConfig:
    """Five sliding layers to a full one, each kind with frequencies of its own."""
    return Gemma3TextConfig(
        **{**_SHAPE, "num_hidden_layers": 6},
        head_dim=8,
        sliding_window=WINDOW,
        query_pre_attn_scalar=20,
    )


def gpt_oss() -> PreTrainedConfig:
    """Sinks, experts, sliding and full layers in turn."""
    return GptOssConfig(
        **_SHAPE,
        head_dim=8,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def olmo3() -> PreTrainedConfig:
    """Three sliding layers to a full one."""
    return Olmo3Config(**{**_SHAPE, "num_hidden_layers": 4}, sliding_window=WINDOW)


def cohere2() -> PreTrainedConfig:
    """Sliding layers rotate, full ones do not; attention and MLP side by side."""
    return Cohere2Config(**{**_SHAPE, "num_hidden_layers": 4}, sliding_window=WINDOW)


def smollm3() -> PreTrainedConfig:
    """The last layer of three has no rotary embedding, and slides."""
    return SmolLM3Config(
        **_SHAPE, no_rope_layer_interval=3, use_sliding_window=True, sliding_window=WINDOW
    )


def phimoe() -> PreTrainedConfig:
    """Experts; its window is applied through a mask only, attention calls do not name it."""
    return PhimoeConfig(**_SHAPE, sliding_window=WINDOW, num_local_experts=4)


def phi3_longrope() -> PreTrainedConfig:
    """Two sets of frequencies, one for requests of up to 64 tokens."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 3.0, 4.5, 6.0],
        "original_max_position_embeddings": 64,
    }
    return Phi3Config(**_SHAPE, rope_parameters=rope)


def bloom() -> PreTrainedConfig:
    return BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4)


def wide_llama() -> PreTrainedConfig:
    """Wide enough that matrix products take the paths that large models take."""
    return LlamaConfig(
        **{
            **_SHAPE,
            "hidden_size": 288,
            "intermediate_size": 768,
            "num_hidden_layers": 2,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
        }
    )


# sinks and capped scores are what SDPA cannot do; gpt_neo has no attention but its own
_EAGER_ONLY = ("bloom", "gemma2", "gpt_neo", "gpt_oss")

SERVED: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gpt2": gpt2,
    "olmo2": olmo2,
    "mistral": mistral,
    "phi3": phi3,
    "qwen2_windowed": qwen2_windowed,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gpt_oss": gpt_oss,
    "olmo3": olmo3,
    "cohere2": cohere2,
    "smollm3": smollm3,
    "phimoe": phimoe,
}


def build(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model of `config` in float32, in eval mode, under transformers' own attention.

    The config is copied: from_config keeps a reference, and a second model made from it with
    another attention would switch the first one's too.
    """
    attention = "eager" if config.model_type in _EAGER_ONLY else "sdpa"
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or ".ln_" in name:
                parameter.copy_(1 + 0.1 * noise if name.endswith("weight") else 0.1 * noise)
            elif parameter.ndim >= 2:
                parameter.copy_(noise * (2.5 * parameter.shape[-1] ** -0.5))
            else:
                parameter.copy_(0.1 * noise)
    return model.float().eval()


def _build_of(make: Callable[[], PreTrainedConfig]) -> PreTrainedModel:
    return build(make())


def save(config: PreTrainedConfig, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Build, write into `folder`, and return the model that was written."""
    model = build(config, seed)
    model.save_pretrained(folder)
    return model


# Each builds the same model every time; for whoever wants an oracle beside a worker.
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    name: partial(_build_of, make) for name, make in SERVED.items()
}
