"""Tiny models with random weights, as folders that any loader can read.

Every parameter is drawn wide enough that greedy answers wander: with transformers' own
initialisation most tiny models repeat one token, and a wrong cache would go unseen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 211
MAX_LEN = 256
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
}


def llama() -> PreTrainedConfig:
    return LlamaConfig(**_SHAPE)


def qwen2() -> PreTrainedConfig:
    return Qwen2Config(**_SHAPE)


def qwen3() -> PreTrainedConfig:
    """With a head_dim that is not hidden_size / heads, and q and k norms."""
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


def mistral_sliding() -> PreTrainedConfig:
    return MistralConfig(**_SHAPE, sliding_window=16)


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


SERVED: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gpt2": gpt2,
    "olmo2": olmo2,
}


def build(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model of `config` in float32, in eval mode, under transformers' own attention.

    The config is copied: from_config keeps a reference, and a second model made from it with
    another attention would switch the first one's too.
    """
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="sdpa" if _has_sdpa(config) else "eager"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or ".ln_" in name:
                parameter.copy_(1 + 0.1 * noise if name.endswith("weight") else 0.1 * noise)
            elif parameter.ndim == 2:
                parameter.copy_(noise * (2.5 * parameter.shape[-1] ** -0.5))
            else:
                parameter.copy_(0.1 * noise)
    return model.float().eval()


def save(config: PreTrainedConfig, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Build, write into `folder`, and return the model that was written."""
    model = build(config, seed)
    model.save_pretrained(folder)
    return model


def _has_sdpa(config: PreTrainedConfig) -> bool:
    return config.model_type != "bloom"
