"""Reads the tokenizer's and the configuration's files of a model; without torch.

`PreTrainedTokenizerFast` is the one class of transformers that loads any tokenizer.json without
importing torch. Other kinds of tokenizer files are refused: what transformers makes of them depends
on which packages happen to be installed. Nothing here runs code that comes with a model.

Owns: finding, opening and parsing files, and a sentence for each way in which that fails. Does not
own what the values mean (model_defaults.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_CONFIG_BYTES: Final = 16 << 20  # of a configuration; real ones have a few kB
_LFS_POINTER: Final = b"version https://git-lfs"  # what git-lfs puts in a file's place

# What tokenizers are kept in where there is no tokenizer.json.
_OTHER_TOKENIZERS: Final = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json",
                            "vocab.txt", "spiece.model", "sentencepiece.bpe.model")  # fmt: skip
_IMPORTS: Final = threading.Lock()


def import_ahead() -> None:
    """Begins to import transformers in a thread: seconds that nobody need wait for, as a tokenizer
    is read when a worker has loaded its model. Errors are left to whoever reads it; a process that
    ends meanwhile does not wait for the thread."""
    threading.Thread(target=_import_ahead, name="imports", daemon=True).start()


def _import_ahead() -> None:
    with contextlib.suppress(Exception):  # also what an import meets while the process ends
        _transformers()


def _transformers() -> tuple[Any, Any]:
    """PreTrainedTokenizerFast and cached_file; one thread at a time.

    Python lets a second thread use a package once its `__init__` has run, but transformers puts
    another object in its place at the end of that: without the lock, the second thread gets the
    first object, which knows no classes, and an ImportError.
    """
    with _IMPORTS:
        from transformers import PreTrainedTokenizerFast
        from transformers.utils.hub import cached_file

        return PreTrainedTokenizerFast, cached_file


def read_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """From a folder or a Hub id; raises OSError or ValueError when there is none to load."""
    tokenizer_class, _ = _transformers()
    if _find(path, "tokenizer.json") is None:
        raise ValueError(_why_no_tokenizer(path))
    try:
        wrapped: PreTrainedTokenizerFast = tokenizer_class.from_pretrained(
            path, trust_remote_code=False
        )
    except BaseException as error:  # a panic on the Rust side is not an Exception
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                     "added_tokens.json"):  # fmt: skip
            read_json(path, name, max_bytes=None)  # may say it better
        raise ValueError(
            "the tokenizer cannot be made of tokenizer.json and the files beside it "
            f"({type(error).__name__}: {error})"
        ) from error
    template = wrapped.chat_template
    if isinstance(template, str) and template.encode().startswith(_LFS_POINTER):
        raise ValueError(_pointer("chat_template.jinja"))
    return wrapped


def _why_no_tokenizer(path: str) -> str:
    others = [name for name in _OTHER_TOKENIZERS if _find(path, name) is not None]
    if not others:
        return "there is no tokenizer.json; copy it from where the model came from"
    return (
        f"there is {' and '.join(others)}, but no tokenizer.json, and only that is read; convert "
        "it once, where sentencepiece and tiktoken are installed: transformers."
        f"AutoTokenizer.from_pretrained({path!r}).save_pretrained({path!r})"
    )


def _find(path: str, name: str) -> Path | None:
    """Raises ValueError for what is there and is no file: nobody would miss what it should hold."""
    _, cached_file = _transformers()
    found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    if found is None and os.path.lexists(os.path.join(path, name)):
        raise ValueError(f"{name} is a link to nothing, or no file at all")
    return None if found is None else Path(found)


def _pointer(name: str) -> str:
    return f"{name} is a Git LFS pointer, not the file itself; run: git lfs pull"


def read_json(
    path: str, name: str, max_bytes: int | None = MAX_CONFIG_BYTES
) -> dict[str, Any] | None:
    """A JSON object of the model, or None when the model has no such file.

    Raises OSError, or ValueError with a sentence that names the file.
    """
    found = _find(path, name)
    if found is None:
        return None
    size = found.stat().st_size
    if max_bytes is not None and size > max_bytes:
        raise ValueError(f"{name} has {size} bytes; allowed: up to {max_bytes}")
    content = found.read_bytes()
    if content.startswith(_LFS_POINTER):
        raise ValueError(_pointer(name))
    if not content.strip():
        raise ValueError(f"{name} is empty; allowed: a JSON object")
    try:
        value = json.loads(content.decode("utf-8-sig"))  # some editors begin with a BOM
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 ({error})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON, or was cut off ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} holds {_kind(value)}; allowed: a JSON object")
    return value


def _kind(value: object) -> str:
    kinds = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
