"""Damaged, partial and foreign checkpoints: refused by name, or served as they are."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.loading import load
from tests.support.tiny_models import llama, phimoe
from worker.kv.geometry import UnsupportedModel

Tensors = dict[str, torch.Tensor]
DOWN = "model.layers.1.mlp.down_proj.weight"


class Checkpoint:
    """A copy of a tiny llama's folder, to be damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights = folder / "model.safetensors"

    def change(self, change: Callable[[Tensors], Tensors | None]) -> None:
        tensors = load_file(self.weights)
        tensors = change(tensors) or tensors
        save_file({k: v.clone() for k, v in tensors.items()}, self.weights, {"format": "pt"})

    def configure(self, **values: object) -> None:
        file = self.folder / "config.json"
        config = {**json.loads(file.read_text()), **values}
        file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    def refuses(self, message: str, **settings: object) -> None:
        with pytest.raises(UnsupportedModel, match=message):
            load(self.folder, **settings)


@pytest.fixture
def checkpoint(saved, tmp_path) -> Checkpoint:
    folder = tmp_path / "tiny"
    shutil.copytree(saved(llama)[0], folder)
    return Checkpoint(folder)


def renamed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: v for k, v in tensors.items() if k not in names}


class Unknown:
    """Nothing that a file of tensors may hold."""


def adding(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.ones(shape, dtype=dtype)})


def peft(tensors: Tensors) -> Tensors:
    named = {
        f"base_model.model.{name.replace('q_proj', 'q_proj.base_layer')}": tensor
        for name, tensor in tensors.items()
    }
    lora = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    return {**named, lora: torch.ones(4, 48)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(DOWN), rf"^llama: .* 1 tensor is missing \({DOWN}\)"),
        (without("lm_head.weight"), r"missing \(lm_head.weight\).*tie_word_embeddings to true"),
        (renamed("_orig_mod."), r"30 tensors are missing .* begin with '_orig_mod\.'"),
        (renamed("module."), r"begin with 'module\.'"),
        (peft, r"adapter's: merge it"),
        (adding(f"{DOWN}_scale", 1), rf"without a place in the model \({DOWN}_scale\).*quantised"),
        (adding("model.layers.0.mlp.down_proj.weight_zero_point", 1), "zero_point.*quantised"),
        (adding("model.layers.1.self_attn.q_proj.bias", 48), r"1 tensor .*q_proj\.bias"),
        (adding("model.layers.1.self_attn.q_norm.weight", 8), r"q_norm\.weight"),
        (adding("model.layers.3.mlp.up_proj.weight", 80, 48), r"layers\.3\.mlp"),
        (adding("model.vision_norm_scale", 48), r"model\.vision_norm_scale"),
        (adding("lm_head.bias", 211), r"lm_head\.bias"),
        (adding("another.weight", 4), r"another\.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(checkpoint, change, message):
    """transformers fills gaps with random numbers and leaves out what is left over: the model
    would answer, and every start differently."""
    checkpoint.change(change)
    checkpoint.refuses(message)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 2}, r"9 tensors .*model\.layers\.2\.\w+.*, and 5 more"),
        ({"num_hidden_layers": 4}, r"9 tensors are missing \(model\.layers\.3\."),
        ({"vocab_size": 300}, r"lm_head\.weight \[211, 48\], not \[300, 48\]"),
        ({"intermediate_size": 96}, r"9 tensors are of another shape .*\[48, 80\], not \[48, 96\]"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "quant_method is 'modelopt'"),
        ({"quantization_config": {"bits": 4}}, "quant_method is None"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"hidden_size": "wide"}, "wide|str"),
        ({"rms_norm_eps": float("nan")}, "its (logits|hidden states) are not finite"),
        ({"model_type": None}, "names no model_type"),
        ({"model_type": "foonet"}, "model_type is 'foonet', which transformers 5"),
        ({"model_type": "vit"}, "vit: .* no causal language model"),
    ],
    ids=str,
)
def test_configurations_that_belong_to_other_weights_are_named(checkpoint, values, message):
    """A mistake in config.json ends as a refusal with its name, never as a restart for ever."""
    checkpoint.configure(**values)
    checkpoint.refuses(message)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_codes_are_no_weights(checkpoint, dtype, file):
    """Without a word about them in config.json the codes of quantised weights would be served as
    weights, hundreds of times too large."""
    tensors = load_file(checkpoint.weights)
    tensors[DOWN] = (100 * tensors[DOWN]).to(dtype)
    checkpoint.weights.unlink()
    if file.endswith("bin"):
        torch.save(tensors, checkpoint.folder / file)
    else:
        save_file(tensors, checkpoint.weights, {"format": "pt"})
    checkpoint.refuses(rf"1 tensor is stored as quantised codes \({DOWN} as ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>not found</html>", r"model\.safetensors \(37 bytes\) is damaged"),
        (b"", r"model\.safetensors \(0 bytes\) is damaged"),
    ],
    ids=["pointer", "page", "empty"],
)
def test_files_that_hold_no_weights_are_named(checkpoint, content, message):
    """An interrupted or forgotten download must say which file to get again."""
    checkpoint.weights.write_bytes(content)
    checkpoint.refuses(message)


def test_damaged_files_are_named(checkpoint):
    """A truncated file, and an index that cannot be read."""
    whole = checkpoint.weights.read_bytes()
    checkpoint.weights.write_bytes(whole[: len(whole) // 2])
    checkpoint.refuses(r"model\.safetensors \([\d,]+ bytes\) is damaged or not whole")
    checkpoint.weights.rename(checkpoint.folder / "model-1.safetensors")
    index = checkpoint.folder / "model.safetensors.index.json"
    for content in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(content)
        checkpoint.refuses(r"index\.json is no index of weight files")
    index.write_text('{"weight_map": {}}')
    checkpoint.refuses(r"index\.json is no index of weight files: .*metadata")
    index.unlink()
    pickled = checkpoint.folder / "pytorch_model.bin"
    torch.save({"lm_head.weight": torch.ones(211, 48)}, pickled)
    for content in (pickled.read_bytes()[:5000], b"", whole[:1000], pickle.dumps({"a": Unknown()})):
        pickled.write_bytes(content)
        checkpoint.refuses(r"pytorch_model\.bin \([\d,]+ bytes\) is damaged or no file of tensors")


def test_old_files_of_tensors_are_looked_into(checkpoint):
    """What torch before 1.6 wrote is no archive and cannot be mapped: codes went unnoticed."""
    tensors = load_file(checkpoint.weights)
    checkpoint.weights.unlink()
    target = checkpoint.folder / "pytorch_model.bin"
    torch.save(tensors, target, _use_new_zipfile_serialization=False)
    load(checkpoint.folder)
    tensors[DOWN] = (100 * tensors[DOWN]).to(torch.int8)
    torch.save(tensors, target, _use_new_zipfile_serialization=False)
    checkpoint.refuses(rf"1 tensor is stored as quantised codes \({DOWN} as int8")


def test_an_expert_that_is_missing_is_named(saved, tmp_path):
    """Experts are stored one by one and stacked while they load: transformers' error names none."""
    folder = tmp_path / "tiny"
    shutil.copytree(saved(phimoe)[0], folder)
    checkpoint = Checkpoint(folder)
    name = next(
        name for name in load_file(checkpoint.weights) if name.endswith("experts.0.w1.weight")
    )
    checkpoint.change(without(name))
    checkpoint.refuses(r"^phimoe: 1 tensor is .*\(model\.layers\.0\..*experts\.gate_up_proj")


def test_a_pointer_for_a_configuration_is_named(checkpoint):
    """`git clone` without LFS leaves pointers for any file."""
    (checkpoint.folder / "config.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    checkpoint.refuses(r"config\.json is a Git LFS pointer")


def test_weights_that_are_not_finite_are_named(checkpoint):
    """Else every request fails, and no word says why."""
    checkpoint.change(lambda tensors: tensors[DOWN][3].fill_(torch.nan) is None or None)
    checkpoint.refuses(rf"{DOWN} holds numbers that are not finite in float32")


def test_an_adapter_is_never_left_out(checkpoint):
    """transformers ignores it where peft is not installed: the plain model would be served."""
    (checkpoint.folder / "adapter_config.json").write_text("{}")
    checkpoint.refuses("holds an adapter .*merge it first")


def test_code_of_a_checkpoint_is_neither_run_nor_asked_about(checkpoint, tmp_path, monkeypatch):
    """transformers would ask whoever started the worker, and run it on a `y`."""
    ran = tmp_path / "ran"
    for name in ("configuration_foo.py", "modeling_foo.py"):
        (checkpoint.folder / name).write_text(f"open({str(ran)!r}, 'w')\n")
    own = {"AutoConfig": "configuration_foo.Foo", "AutoModelForCausalLM": "modeling_foo.Foo"}
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    checkpoint.configure(auto_map=own)  # a family that transformers has: its code is not needed
    load(checkpoint.folder)
    for model_type in ("foonet", "vit"):
        checkpoint.configure(model_type=model_type)
        checkpoint.refuses("code of its own .*, which Chairlift never runs")
    assert not ran.exists()


@pytest.mark.parametrize(
    "change",
    [
        adding("model.layers.0.self_attn.rotary_emb.inv_freq", 4),
        adding("model.layers.0.attn.bias", 1, 1, 8, 8, dtype=torch.uint8),
        adding("model.layers.0.attn.masked_bias", 1),
        adding("model.position_ids", 1, 8, dtype=torch.int64),
        adding("model.vision_tower.layers.0.weight", 4, 4),
        adding("visual.patch_embed.weight", 4, 4),
        adding("model.mtp.layers.0.weight", 4, 4),
        adding("score.weight", 2, 48),
        adding("v_head.summary.bias", 1),
    ],
)
def test_what_the_decoder_does_not_need_is_no_obstacle(checkpoint, change):
    """Checkpoints of several tasks and modalities are good ones, and so are old ones that saved
    what is computed."""
    checkpoint.change(change)
    load(checkpoint.folder)


def test_layers_that_predict_further_tokens_are_no_obstacle(checkpoint):
    """They lie behind the last layer, as many as the configuration says, and are not served."""
    checkpoint.change(adding("model.layers.3.eh_proj.weight", 4, 4))
    checkpoint.configure(num_nextn_predict_layers=1)
    load(checkpoint.folder)


def test_tied_weights_may_be_in_the_file_once_or_twice(checkpoint):
    """Most small models share the embedding with lm_head, and their files hold one or both."""
    checkpoint.configure(tie_word_embeddings=True)

    def tie(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    checkpoint.change(tie)
    load(checkpoint.folder)
    checkpoint.change(without("lm_head.weight"))
    load(checkpoint.folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(checkpoint):
    """The service's user is seldom the one who downloaded."""
    checkpoint.weights.chmod(0)
    with pytest.raises(OSError, match=r"[Pp]ermission"):
        load(checkpoint.folder)


def test_memory_that_is_short_is_told_in_numbers(checkpoint, monkeypatch):
    """It is not the model's fault, and the numbers say what would help."""

    def allocate(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr("worker.model.load.read_model", allocate)
    with pytest.raises(MemoryError, match=r"tiny: not enough memory: .* of [\d.,]+ GiB are"):
        load(checkpoint.folder)


@pytest.mark.parametrize(
    "content", ["[1]", '{"max_new_tokens": "x"}', '{"top_k": 1' + "0" * 5000 + "}", "{"]
)
def test_a_generation_config_is_left_to_the_scheduler(checkpoint: Checkpoint, content: str) -> None:
    """It names file, key and value; transformers says "'list' object is not a mapping"."""
    (checkpoint.folder / "generation_config.json").write_text(content)
    assert load(checkpoint.folder).model_type == "llama"


@pytest.mark.parametrize(("content", "kind"), [("[1]", "list"), ('"x"', "str")])
def test_a_configuration_that_is_no_object_is_named(
    checkpoint: Checkpoint, content: str, kind: str
) -> None:
    """transformers says "'list' object has no attribute 'get'", and not of which file."""
    (checkpoint.folder / "config.json").write_text(content)
    checkpoint.refuses(rf"config\.json holds a {kind}; allowed: a JSON object")
