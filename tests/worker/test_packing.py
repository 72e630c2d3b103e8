"""The pass over a loaded model: what it replaces, what it leaves, and that the tokens stay."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.support import tiny_models
from tests.support.loading import load
from worker.cpu_layers.packed_linear import PackedLinear
from worker.cpu_layers.packing import is_packed, pack_model

COUNTS = (9, 6, 4)


def answers(served, make, prompts, **settings):
    it = served(make, **settings)
    return it.answers(prompts[1:4], COUNTS), it.loaded.model


@pytest.mark.parametrize("make", tiny_models.SERVED.values(), ids=tiny_models.SERVED.keys())
def test_tokens_are_those_of_the_plain_twin(served, prompts, make):
    """A layer whose weights are transposed, joined or biased wrongly, in one family only."""
    plain, _ = answers(served, make, prompts, weight_format="unpacked")
    packed, model = answers(served, make, prompts)
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    assert isinstance(model.get_output_embeddings(), PackedLinear)
    for one, other in zip(packed, plain, strict=True):
        assert one.tokens == other.tokens
        torch.testing.assert_close(one.logits, other.logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("weight_format", "bound"), [("float16", 4e-3), ("int8", 0.6)])
@pytest.mark.parametrize("make", [tiny_models.llama, tiny_models.gpt2, tiny_models.gemma2])
def test_rounded_weights_stay_close(served, prompts, make, weight_format, bound):
    """Rounding is small and not a bug: the logits of the prompts' last tokens keep their order of
    magnitude of error."""
    plain, _ = answers(served, make, prompts, weight_format="unpacked")
    packed, _ = answers(served, make, prompts, weight_format=weight_format)
    for one, other in zip(packed, plain, strict=True):
        error = (one.logits[0] - other.logits[0]).abs().max() / other.logits[0].abs().max()
        assert 0 < error < bound


def test_what_is_replaced_and_what_is_left():
    """A layer that does more than x W^T + b must keep doing it."""

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = tiny_models.build(tiny_models.llama())
    layer = model.model.layers[0]
    layer.mlp.up_proj = Scaled(48, 80)
    layer.mlp.gate_proj.register_forward_hook(lambda _module, _inputs, output: output + 1)
    model.model.layers[1].mlp = layer.mlp  # one module, two places
    pack_model(model, "float32", lambda _share: None)
    left = [path for path, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)]
    assert left == ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
    assert not is_packed(model)
    assert isinstance(layer.mlp.down_proj, PackedLinear)
    assert model.model.layers[1].mlp.down_proj is layer.mlp.down_proj


def test_originals_are_given_back_and_the_embedding_stays():
    """Kept beside the packed ones, weights would take twice the memory; and an embedding that
    lost the table that it shared would answer garbage."""
    model = tiny_models.build(tiny_models.llama())
    model.lm_head.weight = model.model.embed_tokens.weight
    table = model.model.embed_tokens.weight.clone()
    of_layer = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    pack_model(model, "int8", lambda _share: None)
    gc.collect()
    assert of_layer() is None
    assert torch.equal(model.model.embed_tokens.weight, table)
    assert model.lm_head.storage == "blocks8"


def test_progress_and_one_line_that_says_what_was_done(saved, caplog):
    """Packing a large model takes a while; and an operator must see which weights are served."""
    seen = []
    model = tiny_models.build(tiny_models.gpt2())
    with caplog.at_level(logging.INFO):
        pack_model(model, "float16", seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1
    assert len(seen) == 3 * 4 + 1
    assert "packed 13 linear layers as float16 (13 stored as float16): weights" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight_format": "int3"}, "weight_format is 'int3'; allowed are float32, float16, int8"),
        (
            {"weight_format": "int8", "dtype": "bfloat16"},
            "weight_format is 'int8', but packed weights need float32 on the CPU, not torch.bfl",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_refused_by_name(saved, settings, message):
    """Served as something else, a wish would be ignored silently."""
    with pytest.raises(ValueError, match=message):
        load(saved(tiny_models.llama)[0], **settings)


def test_another_dtype_stays_as_it_is(saved):
    """float32 is the default, and means nothing for a model that is not in float32."""
    model = load(saved(tiny_models.llama)[0], dtype="bfloat16").model
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_without_a_compiler(saved, monkeypatch, tmp_path, caplog):
    """float32 still serves, unpacked and with a warning; other formats are refused."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path))
    path, _ = saved(tiny_models.llama)
    model = load(path).model
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    assert "linear layers stay unpacked, which is slower: there is no C compiler" in caplog.text
    with pytest.raises(ValueError, match="weight_format is 'int8', but there is no C compiler"):
        load(path, weight_format="int8")


def test_a_weight_that_the_format_cannot_hold_names_its_layer(tmp_path):
    """Of hundreds of layers, which one?"""
    model = tiny_models.build(tiny_models.llama())
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = 1e6
    with pytest.raises(ValueError, match=r"in model\.layers\.1\.mlp\.up_proj a weight is 1e\+06"):
        pack_model(model, "float16", lambda _share: None)
