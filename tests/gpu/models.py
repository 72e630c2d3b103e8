"""Models of well-known shapes with random weights, made on the device: no file, no tokenizer."""

from __future__ import annotations

import copy
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.gpu.card import DEVICE, DTYPE, IS_CUDA
from tests.support.loading import configure
from tests.support.promised_geometry import promised_geometry
from tests.support.runners import pad_steps
from worker.attention.interface import ATTENTION_NAME, register
from worker.model.load import LoadedModel
from worker.runner import Runner

PAGE_SIZE: Final = 16
MAX_LEN: Final = 4096
_SHARED: Final = {
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_TINY: Final = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
}
_SHAPES: Final[dict[str, dict[str, Any]]] = {
    "Llama-3.2-1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
    },
}
NAMES: Final = tuple(_SHAPES)


def config_of(name: str) -> LlamaConfig:
    """The shape of `name`; a tiny one in its place on a CPU."""
    return LlamaConfig(**(_SHAPES[name] if IS_CUDA else _TINY), **_SHARED)


def weight_bytes(name: str) -> int:
    """Roughly, to know whether there is room."""
    config = config_of(name)
    hidden, heads, kv_heads = (
        config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    )  # fmt: skip
    of_layer = hidden * config.head_dim * 2 * (heads + kv_heads)
    of_layer += 3 * hidden * config.intermediate_size
    return DTYPE.itemsize * (config.num_hidden_layers * of_layer + 2 * config.vocab_size * hidden)


def random_model(name: str, attention: str) -> Any:
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config_of(name)), attn_implementation=attention, dtype=DTYPE
        )
    return model.eval()


def random_loaded(name: str) -> LoadedModel:
    """As load.py would give it."""
    register()
    model = random_model(name, ATTENTION_NAME)
    return LoadedModel(
        model=model,
        hidden_states=model.base_model,
        model_path="",
        model_type=model.config.model_type,
        architecture=type(model).__name__,
        vocab_size=model.config.vocab_size,
        max_model_len=MAX_LEN,
        dtype=DTYPE,
        kv_dtype=DTYPE,
        device=DEVICE,
        geometry=promised_geometry(model.config, PAGE_SIZE, DTYPE.itemsize),
    )


def runner_of(loaded: LoadedModel, num_tokens: int, *, graphs: bool, **settings: Any) -> Runner:
    """With a pool of so many tokens; on a CPU `graphs` means static inputs of few shapes."""
    told = configure(
        device=str(DEVICE), page_size=PAGE_SIZE, use_cuda_graph=graphs,
        **{"max_batch_tokens": 2048, "max_requests_per_batch": 64, **settings},
    )  # fmt: skip
    chunks = 2 + loaded.geometry.chunks_for_tokens(num_tokens)
    runner = Runner(loaded, told, chunks)
    if graphs:
        pad_steps(runner)
    return runner
