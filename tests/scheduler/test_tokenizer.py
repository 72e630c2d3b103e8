"""Tokenizers: any folder with a tokenizer.json, its EOS and defaults; and never torch."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from scheduler_svc.tokenizer import Tokenizer
from tests.scheduler.small_tokenizers import byte_level, chat, metaspace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    chat().save_pretrained(tmp_path)
    return tmp_path


def write(folder: Path, name: str, **content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def test_load_and_back(folder: Path) -> None:
    """What is encoded comes back byte for byte, with nothing tidied up."""
    tokenizer = Tokenizer.load(str(folder))
    text = "don 't tidy , this up  ď\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.has_chat_template
    assert tokenizer.default_sampling == {}


@pytest.mark.parametrize(
    ("generation", "model", "want"),
    [
        (None, None, [257]),
        ({"eos_token_id": 5}, {"eos_token_id": 7}, [5, 257]),
        ({"eos_token_id": [5, 257, 6]}, None, [5, 6, 257]),
        ({}, {"eos_token_id": 7}, [257]),
        (None, {"eos_token_id": 7}, [7, 257]),
    ],
)
def test_eos_is_a_list(
    folder: Path,
    generation: dict[str, Any] | None,
    model: dict[str, Any] | None,
    want: list[int],
) -> None:
    """A missed EOS lets answers run on into invented turns."""
    if generation is not None:
        write(folder, "generation_config.json", **generation)
    if model is not None:
        write(folder, "config.json", model_type="llama", **model)
    assert Tokenizer.load(str(folder)).eos_token_ids == tuple(want)


def test_only_stated_defaults_count(folder: Path) -> None:
    """transformers fills in top_k 50: that is not what the model's makers said."""
    write(folder, "generation_config.json", temperature=0.6, top_k=20, max_length=20)
    assert Tokenizer.load(str(folder)).default_sampling == {"temperature": 0.6, "top_k": 20}


def test_odd_defaults_are_none() -> None:
    """Some files say top_k -1 for "off"; unchecked, it would reach the sampler."""
    odd = {"top_k": -1, "top_p": 0.0, "temperature": None, "min_p": "0.1"}
    assert Tokenizer(chat(), odd).default_sampling == {}


def test_a_default_that_cannot_be_honoured_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Refusing every request of such a model would be worse, saying nothing dishonest."""
    with caplog.at_level(logging.WARNING):
        tokenizer = Tokenizer(chat(), {"repetition_penalty": 1.1})
    assert "repetition_penalty 1.1" in caplog.text
    assert tokenizer.default_sampling == {}


def test_cutting_and_padding_are_off() -> None:
    """Some tokenizer.json cut at 512 tokens: the prompt's end would vanish without a word."""
    wrapped = chat()
    wrapped.backend_tokenizer.enable_truncation(3)
    wrapped.backend_tokenizer.enable_padding(length=10)
    assert len(Tokenizer(wrapped).encode("hello")) == 5


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_a_folder_without_a_tokenizer(tmp_path: Path, content: str | None) -> None:
    """The reason must reach clients and log; an unknown exception would end the loading task."""
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises((OSError, ValueError)):
        Tokenizer.load(str(tmp_path))


def test_decoder_is_decode() -> None:
    """Streams and Detokenize must agree."""
    tokenizer = Tokenizer(chat())
    ids = byte_level().encode("<|im_start|>x").ids
    for skip in (True, False):
        assert tokenizer.decoder(skip)(ids) == tokenizer.decode(ids, skip)


def test_only_decoders_that_join_their_tokens_have_pieces() -> None:
    """sentencepiece's kind strips a first space: joined, single tokens would lose every space."""
    tokenizer = Tokenizer(chat())
    pieces, shown = tokenizer.pieces(True), tokenizer.pieces(False)
    assert pieces is not None
    assert shown is not None
    ids = tokenizer.encode("<|im_start|>x y")
    assert "".join(pieces[token_id] for token_id in ids) == "x y"
    assert "".join(shown[token_id] for token_id in ids) == "<|im_start|>x y"
    assert tokenizer.pieces(True) is pieces
    assert Tokenizer(PreTrainedTokenizerFast(tokenizer_object=metaspace())).pieces(True) is None


def test_the_scheduler_process_never_imports_torch(folder: Path) -> None:
    """torch costs seconds of start and hundreds of MB in a process that has no use for it."""
    code = f"""
import importlib, pkgutil, sys
import scheduler_svc
for module in pkgutil.walk_packages(scheduler_svc.__path__, "scheduler_svc."):
    importlib.import_module(module.name)
from scheduler_svc.tokenizer import Tokenizer
tokenizer = Tokenizer.load({str(folder)!r})
tokenizer.encode_chat([{{"role": "user", "content": "hi"}}])
assert "scheduler_svc.server" in sys.modules
assert sys.modules.get("torch") is None, "torch was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
