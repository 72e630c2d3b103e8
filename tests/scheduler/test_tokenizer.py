"""Tokenizers: any folder with a tokenizer.json, its EOS and defaults; and never torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from scheduler_svc.text.tokenizer import Tokenizer
from tests.support.small_tokenizers import byte_level, chat, metaspace


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
    assert tokenizer.defaults.numbers == {}


def test_a_models_files_are_read(folder: Path) -> None:
    """EOS and defaults that are found and not used let answers run on, or sample otherwise."""
    write(folder, "generation_config.json", temperature=0.6, top_k=20, max_length=20)
    write(folder, "config.json", model_type="llama", eos_token_id=7)
    tokenizer = Tokenizer.load(str(folder))
    assert tokenizer.defaults.numbers == {"temperature": 0.6, "top_k": 20}
    assert tokenizer.eos_token_ids == (7, 257)


@pytest.mark.parametrize(
    ("template", "want"),
    [
        ("{{ messages[0].content }}", True),
        ({"default": "{{ messages[0].content }}", "rag": "{{ documents }}"}, True),
        ("{{ messages[0].content + 1 }}", True),  # what it makes of a message is no matter here
        ("{{ raise_exception('a system message must come first') }}", True),
        ({"rag": "x", "tool_use": "y"}, False),
        ({}, False),
        ("{% for message in messages %}", False),
        ("{{ messages | no_such_filter }}", False),
        (5, False),
        (None, False),
    ],
)
def test_a_template_that_cannot_be_used_is_none(
    template: Any, want: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients choose between chat and text by it; each chat would be an internal error."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), eos_token="<|im_end|>", chat_template=template
    )
    assert Tokenizer(wrapped).has_chat_template is want
    assert ("unusable chat template" in caplog.text) is (not want and template is not None)


def test_cutting_and_padding_are_off() -> None:
    """Some tokenizer.json cut at 512 tokens: the prompt's end would vanish without a word."""
    wrapped = chat()
    wrapped.backend_tokenizer.enable_truncation(3)
    wrapped.backend_tokenizer.enable_padding(length=10)
    assert len(Tokenizer(wrapped).encode("hello")) == 5


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
from scheduler_svc.text.chat_template import Chat
from scheduler_svc.text.tokenizer import Tokenizer
tokenizer = Tokenizer.load({str(folder)!r})
tokenizer.encode_chat(Chat([{{"role": "user", "content": "hi"}}]))
assert "scheduler_svc.front.server" in sys.modules
assert sys.modules.get("torch") is None, "torch was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
