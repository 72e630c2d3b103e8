"""A tiny configuration of every causal-LM family that transformers can map to a model.

Most families need no words of their own: fields have the same names everywhere, and each takes the
values of TINY that it has a field for. What a family needs beside that is in HINTS. Windows are
13 tokens, far shorter than most prompts.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES: Final = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
VOCAB_SIZE: Final = 211
MAX_LEN: Final = 256
WINDOW: Final = 13

_HIDDEN, _MLP, _LAYERS, _HEADS, _HEAD_DIM, _EXPERTS = 48, 80, 4, 6, 8, 4
TINY: Final[dict[str, Any]] = {
    **dict.fromkeys(
        ("vocab_size", "text_vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE
    ),
    **dict.fromkeys(
        (
            "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len",
            "max_sequence_length", "max_target_positions",
        ),
        MAX_LEN,
    ),
    **dict.fromkeys(
        (
            "hidden_size", "n_embd", "d_model", "emb_dim", "dim_model", "word_embed_proj_dim",
            "embedding_size", "input_embedding_size", "output_embedding_size",
        ),
        _HIDDEN,
    ),
    **dict.fromkeys(
        (
            "intermediate_size", "ffn_dim", "d_ff", "dim_ff", "decoder_ffn_dim", "encoder_ffn_dim",
            "mlp_hidden_size", "ffn_hidden_size",
        ),
        _MLP,
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), _LAYERS
    ),
    **dict.fromkeys(
        (
            "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
            "encoder_attention_heads",
        ),
        _HEADS,
    ),
    **dict.fromkeys(
        (
            "head_dim", "d_kv", "dim_head", "kv_channels", "rotary_dim", "attention_head_size",
            "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "state_size", "mamba_d_state",
            "hidden_size_per_layer_input",
        ),
        _HEAD_DIM,
    ),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _EXPERTS
    ),
    **dict.fromkeys(
        (
            "num_key_value_heads", "num_experts_per_tok", "num_experts_per_token", "moe_k",
            "moe_topk", "num_selected_experts", "encoder_layers", "type_vocab_size",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size", "shared_expert_intermediate_size",
            "shared_intermediate_size", "expert_intermediate_size",
        ),
        32,
    ),
    **dict.fromkeys(
        (
            "n_group", "topk_group", "moe_num_shared_experts", "n_shared_experts",
            "first_k_dense_replace", "decoder_sparse_step", "num_mem_blocks",
        ),
        1,
    ),
    **dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id", "forced_eos_token_id",
         "num_global_key_value_heads", "global_head_dim"),
        None,
    ),
    "qk_head_dim": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "num_kv_shared_layers": 0,
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,
}  # fmt: skip
# of the parts of composite models that are not asked here
_TINY_SIGHT: Final[dict[str, Any]] = {
    **TINY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "depth": 1,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

_ASKED_PARTS: Final = ("text_config", "decoder", "decoder_config")

_DECODER: Final = {"is_decoder": True}
_PADDED: Final = {"is_decoder": True, "pad_token_id": 1}
_ENCODER_DECODER: Final = {
    "is_decoder": True,
    "is_encoder_decoder": False,
    "encoder_layers": 4,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
}
_GRANITE: Final = {
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}
_ROPE: Final = {"rope_type": "default", "rope_theta": 10000.0}
_ALL_FULL: Final = ["full_attention"] * _LAYERS

HINTS: Final[dict[str, dict[str, Any]]] = {
    **dict.fromkeys(
        (
            "bert", "bert-generation", "electra", "ernie", "megatron-bert", "rembert", "roc_bert",
            "roformer", "roberta-prelayernorm", "reformer",
        ),
        _DECODER,
    ),
    **dict.fromkeys(
        ("camembert", "data2vec-text", "roberta", "xlm-roberta", "xlm-roberta-xl", "xmod"), _PADDED
    ),
    **dict.fromkeys(
        (
            "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp",
            "pegasus", "plbart",
        ),
        _ENCODER_DECODER,
    ),
    **dict.fromkeys(
        ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "hyperclovax"), _GRANITE
    ),
    "bamba": {
        "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 1, "attn_layer_indices": [1],
    },
    "big_bird": {**_DECODER, "attention_type": "original_full"},
    "cwm": {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 0},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {"num_key_value_heads": 6},
    "falcon": {"alibi": False},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "emu3": {
        "vq_config": {
            "codebook_size": 16, "embed_dim": 4, "latent_channels": 4, "base_channels": 8,
            "channel_multiplier": [1], "num_res_blocks": 1, "hidden_size": 8,
        },
    },
    "emu3_text_model": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "fuyu": {"text_config": {}, "image_size": 30, "patch_size": 30},
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
        "backbone_hidden_size": _HIDDEN,
    },
    "gemma4_unified_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
        "backbone_hidden_size": _HIDDEN,
    },
    "gemma4_unified_text": {"pad_token_id": 0},
    "got_ocr2": {
        "vision_config": {"output_channels": 8, "image_size": 32, "patch_size": 16, "mlp_dim": 16},
    },
    "gemma4_text": {"pad_token_id": 0, "global_head_dim": 16, "num_global_key_value_heads": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "gpt_oss": {"rope_parameters": _ROPE},
    "granitemoehybrid": {
        "layer_types": ["attention"] * _LAYERS, "mamba_n_heads": 6, "mamba_d_head": 16,
    },
    "inkling2_loop_text": {"unpadded_vocab_size": VOCAB_SIZE},
    "inkling2_text": {"unpadded_vocab_size": VOCAB_SIZE},
    "lfm2_moe": {"layer_types": _ALL_FULL, "num_dense_layers": 1},
    "llama4_text": {"attention_chunk_size": 16, "intermediate_size_mlp": _MLP},
    "mamba2": {"num_heads": 6, "head_dim": 16, "n_groups": 1},
    "ministral3": {
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
            "original_max_position_embeddings": 32, "max_position_embeddings": MAX_LEN,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "mimo_v2_flash": {"num_attention_heads": 8, "head_dim": 12},
    "mllama": {
        "vision_config": {
            "num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 32,
            "intermediate_layers_indices": [0],
        },
    },
    "mllama_text_model": {"cross_attention_layers": [1], "bos_token_id": 1},
    "modernbert-decoder": {
        "local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    },
    "olmo": {"clip_qkv": 0.5},
    "olmoe": {"clip_qkv": 0.5, "num_key_value_heads": _HEADS},
    "phi": {"partial_rotary_factor": 0.5},
    "reformer": {
        **_DECODER, "axial_pos_embds": False, "attn_layers": ["local", "local"],
        "num_attention_heads": 2, "attention_head_size": 24, "feed_forward_size": _MLP,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "zamba2": {"layer_types": ["linear_attention", "hybrid"] * 2, "mamba_headdim": 16},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

# The same families with switches that change what their attention does.
VARIANTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "bert, encoder": ("bert", {"is_decoder": False}),
    "falcon, alibi": ("falcon", {"alibi": True}),
    "falcon, grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gemma3n_text, shared": ("gemma3n_text", {"num_kv_shared_layers": 2}),
    "gemma4_text, shared": (
        "gemma4_text", {"num_hidden_layers": 12, "num_kv_shared_layers": 6},
    ),
    "gemma4_text, alike": (
        "gemma4_text", {"global_head_dim": _HEAD_DIM, "num_global_key_value_heads": 2},
    ),
    "lfm2, conv": ("lfm2", {"full_attn_idxs": [1, 3]}),
    "opt, post-norm": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "qwen2, windowed": (
        "qwen2", {"use_sliding_window": True, "max_window_layers": 2},
    ),
    "qwen2_moe, windowed": (
        "qwen2_moe", {"use_sliding_window": True, "max_window_layers": 2},
    ),
    "qwen3_moe, windowed": (
        "qwen3_moe", {"use_sliding_window": True, "max_window_layers": 2},
    ),
}  # fmt: skip


def tiny_config(name: str) -> PreTrainedConfig:
    """A family's or variant's tiny configuration. Raises whatever that configuration raises."""
    family, switches = VARIANTS.get(name, (name, {}))
    return _tiny(CONFIG_MAPPING[family], TINY, {**HINTS.get(family, {}), **switches})


def _tiny(
    kind: type[PreTrainedConfig], values: dict[str, Any], hints: dict[str, Any]
) -> PreTrainedConfig:
    fields = {field.name for field in dataclasses.fields(kind)}
    chosen = {name: value for name, value in values.items() if name in fields}
    chosen.update(hints)
    for name in kind.sub_configs:
        part = _part(kind, name)
        if part is not None and isinstance(chosen.get(name, {}), dict):
            of_part = TINY if name in _ASKED_PARTS else _TINY_SIGHT
            switches = {**HINTS.get(part.model_type, {}), **chosen.get(name, {})}
            chosen[name] = _tiny(part, of_part, switches)
    return kind(**chosen)


def _part(kind: type[PreTrainedConfig], name: str) -> type[PreTrainedConfig] | None:
    """The class of a part of a composite configuration; None where nothing says it."""
    part: Any = kind.sub_configs[name]
    if not dataclasses.is_dataclass(part):  # AutoConfig: any model may be put there
        by_default = getattr(kind, "sub_configs_defaults", {}).get(name)
        model_type = getattr(by_default, "model_type", None)
        part = CONFIG_MAPPING[model_type] if model_type else None
    return part  # type: ignore[no-any-return]
