"""Reads a model's tokenizer and configuration files, without torch.

`PreTrainedTokenizerFast` is the one class of transformers that loads any tokenizer.json without
importing torch. Other kinds of tokenizer files are refused: how transformers converts them depends
on which packages happen to be installed. Nothing here runs code that comes with a model.

Owns finding, opening and parsing files, and a clear error for each way in which that fails. Does
not own the meaning of the values (model_defaults.py).
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

MAX_CONFIG_BYTES: Final = 16 << 20  # per configuration file; real ones have a few kB
_LFS_POINTER: Final = b"version https://git-lfs"  # placeholder of git-lfs for a file

# Files of tokenizers without a tokenizer.json.
_OTHER_TOKENIZERS: Final = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json",
                            "vocab.txt", "spiece.model", "sentencepiece.bpe.model")  # fmt: skip
_IMPORTS: Final = threading.Lock()


def import_ahead() -> None:
    """Starts importing transformers in a thread: it takes seconds, and the tokenizer is only needed
    when a worker has loaded its model. Errors show at that later import; the thread is a daemon, so
    that a stopping process does not wait for it."""
    threading.Thread(target=_import_ahead, name="imports", daemon=True).start()


def _import_ahead() -> None:
    with contextlib.suppress(Exception):  # including those of an import while the process exits
        _transformers()


def _transformers() -> tuple[Any, Any]:
    """PreTrainedTokenizerFast and cached_file; one thread at a time.

    Python lets a second thread use a package once its `__init__` has run, but transformers replaces
    its module object at the end of that: without the lock, a second thread may get the first
    object, which has no classes, and an ImportError.
    """
    with _IMPORTS:
        from transformers import PreTrainedTokenizerFast
        from transformers.utils.hub import cached_file

        return PreTrainedTokenizerFast, cached_file


def read_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """From a folder or a Hub id; raises OSError or ValueError if it cannot be loaded."""
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
            read_json(path, name, max_bytes=None)  # may raise a clearer error
        raise ValueError(
            "the tokenizer cannot be loaded from tokenizer.json and the files beside it "
            f"({type(error).__name__}: {error})"
        ) from error
    template = wrapped.chat_template
    if isinstance(template, str) and template.encode().startswith(_LFS_POINTER):
        raise ValueError(_pointer("chat_template.jinja"))
    return wrapped


def _why_no_tokenizer(path: str) -> str:
    others = [name for name in _OTHER_TOKENIZERS if _find(path, name) is not None]
    if not others:
        return "there is no tokenizer.json; copy it from the model's source"
    return (
        f"there is {' and '.join(others)}, but no tokenizer.json, the only format read; convert "
        "it once, where sentencepiece and tiktoken are installed: transformers."
        f"AutoTokenizer.from_pretrained({path!r}).save_pretrained({path!r})"
    )


def _find(path: str, name: str) -> Path | None:
    """Raises ValueError if the path exists but is not a file: ignoring it would go unnoticed."""
    _, cached_file = _transformers()
    found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    if found is None and os.path.lexists(os.path.join(path, name)):
        raise ValueError(f"{name} is a broken link, or not a file")
    return None if found is None else Path(found)


def _pointer(name: str) -> str:
    return f"{name} is a Git LFS pointer, not the file itself; run: git lfs pull"


def read_json(
    path: str, name: str, max_bytes: int | None = MAX_CONFIG_BYTES
) -> dict[str, Any] | None:
    """The JSON object in a model's file, or None if there is no such file.

    Raises OSError, or ValueError with a message that names the file.
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
    kinds = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
