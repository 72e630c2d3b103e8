"""Loading: what is decided on the way, and which models are refused, by name and reason."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    T5Config,
    XLNetConfig,
)

from protos import link_pb2
from tests.support import tiny_models
from tests.support.loading import load
from worker.attention.interface import ATTENTION_NAME, register
from worker.kv.geometry import UnsupportedModel
from worker.model.embedded import ModelNotFound
from worker.model.load import _max_model_len, kv_dtype_of, load_model
from worker.model.model_check import check_config


@pytest.mark.parametrize("make", tiny_models.SERVED.values(), ids=tiny_models.SERVED.keys())
def test_facts_of_a_loaded_model(saved, make):
    """What Ready tells the scheduler; admission and sampling rest on it."""
    path, original = saved(make)
    loaded = load(path, max_model_len=100)
    assert loaded.model_path == str(path)
    assert loaded.model_type == original.config.model_type
    assert loaded.architecture == type(original).__name__
    assert loaded.vocab_size == loaded.num_embeddings == tiny_models.VOCAB_SIZE
    assert loaded.max_model_len == 100
    assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))
    assert loaded.geometry.num_layers == original.config.num_hidden_layers
    assert not loaded.model.training
    assert loaded.model.config._attn_implementation == ATTENTION_NAME


def test_auto_is_float32_on_the_cpu_and_others_are_obeyed(saved):
    """16-bit arithmetic is slow on a CPU; whoever asks for it gets it, weights and pool."""
    path, _ = saved(tiny_models.llama)
    assert load(path).dtype == torch.float32
    loaded = load(path, dtype="bfloat16")
    assert loaded.dtype == torch.bfloat16
    assert (loaded.kv_dtype, loaded.geometry.itemsize) == (torch.bfloat16, 2)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("wanted", "dtype", "device", "weight_format", "stored"),
    [
        ("", torch.float32, "cpu", "", torch.float32),
        ("auto", torch.float32, "cpu", "float32", torch.float32),
        ("auto", torch.float32, "cpu", "float16", torch.float32),
        ("auto", torch.float32, "cpu", "int8", torch.float16),
        ("auto", torch.bfloat16, "cuda", "float32", torch.bfloat16),
        ("auto", torch.bfloat16, "cpu", "int8", torch.bfloat16),  # int8 is refused later on
        ("auto", torch.float32, "cuda", "int8", torch.float32),
        ("float32", torch.float32, "cpu", "int8", torch.float32),
        ("float16", torch.float32, "cpu", "float32", torch.float16),
        ("bfloat16", torch.float32, "cpu", "int8", torch.bfloat16),
        ("float32", torch.float16, "cuda", "float32", torch.float32),
    ],
)
def test_what_keys_and_values_are_stored_in(wanted, dtype, device, weight_format, stored):
    """Exact answers must not become approximate unasked; int8's already are."""
    assert kv_dtype_of(wanted, dtype, torch.device(device), weight_format) == stored


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kv_cache_dtype": "fp8"},
            "kv_cache_dtype is 'fp8'; allowed are auto, float32, float16, bfloat16",
        ),
        ({"dtype": "int8"}, "dtype is 'int8'; allowed are auto, float32, float16, bfloat16"),
        ({"device": "tpu"}, "device is 'tpu'; allowed are auto, cpu"),
        ({"device": "cuda:99"}, "device is 'cuda:99', but this machine has"),
        ({"max_model_len": 257}, "max_model_len is 257, but llama has 256 positions"),
        ({"max_model_len": -1}, "max_model_len is -1"),
    ],
    ids=str,
)
def test_bad_settings_name_value_and_limit(saved, settings, message):
    """A person reads these; they must say what was wrong and what is allowed."""
    with pytest.raises(ValueError, match=message):
        load(saved(tiny_models.llama)[0], **settings)


def test_the_pool_is_as_narrow_as_asked(saved):
    """Geometry counts the pool's bytes; weights and arithmetic stay as they are."""
    loaded = load(saved(tiny_models.llama)[0], kv_cache_dtype="float16")
    assert (loaded.dtype, loaded.kv_dtype) == (torch.float32, torch.float16)
    assert loaded.geometry.itemsize == 2
    assert load(saved(tiny_models.llama)[0], weight_format="int8").kv_dtype == torch.float16


def test_max_model_len_defaults_to_the_models():
    """0 means all; a model that names no length must be told one."""
    assert _max_model_len(0, LlamaConfig(max_position_embeddings=77)) == 77
    assert _max_model_len(50, tiny_models.bloom()) == 50
    assert _max_model_len(0, tiny_models.bloom()) == 0
    assert _max_model_len(50, XLNetConfig()) == 50  # its configuration says -1


def test_bloom_is_refused_by_the_probe(saved):
    """It never calls the attention interface: without the probe it would run, and answer garbage
    from the second step on."""
    with pytest.raises(UnsupportedModel, match=r"bloom: .* 2 hidden layers.* called 0 times"):
        load(saved(tiny_models.bloom)[0], max_model_len=64)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "llama: its RoPE is 'dynamic'.* one long request would change",
        ),
        (T5Config(), "t5: it is an encoder-decoder"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_configurations_that_are_refused(config, message):
    """Each of these would run, and some request would silently get wrong tokens."""
    with pytest.raises(UnsupportedModel, match=message):
        check_config(config)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("use_bidirectional_attention", True, "use_bidirectional_attention is True"),
        ("use_bidirectional_attention", "all", "use_bidirectional_attention is 'all'"),
        ("is_causal", False, "is_causal is False"),
    ],
)
def test_attributes_that_are_refused(name, value, message):
    """The same, for attributes that several families share."""
    config = LlamaConfig(head_dim=128)
    setattr(config, name, value)
    with pytest.raises(UnsupportedModel, match=message):
        check_config(config)


def test_attention_outside_of_a_step_fails_clearly():
    """Without a context there is nothing to attend to."""
    register()
    config = GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    with pytest.raises(RuntimeError, match="chairlift_paged was called outside of a step"):
        model(torch.tensor([[1]]))


def test_a_name_that_leads_nowhere_is_told_once() -> None:
    """The sentence is shown to every client that asks; a class's name in it helps nobody."""
    with pytest.raises(ModelNotFound) as error:
        load_model(link_pb2.Configure(model="./nowhere"), lambda what, share: None)
    assert str(error.value).startswith("model './nowhere' is not an existing folder")
