"""Reads the tokenizer's and the configuration's files of a model; without torch.

`PreTrainedTokenizerFast` is the one class of transformers that loads any tokenizer.json without
importing torch.
"""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def import_ahead() -> None:
    """Begin to import transformers in a thread: seconds that nobody need wait for, as a tokenizer
    is read when a worker has loaded its model. Errors are left to who reads it."""
    threading.Thread(target=_import_transformers, name="imports").start()


def _import_transformers() -> None:
    with contextlib.suppress(ImportError):
        from transformers import PreTrainedTokenizerFast  # noqa: F401
        from transformers.utils.hub import cached_file  # noqa: F401


def read_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """From a folder or a Hub id; raises OSError or ValueError when there is none to load."""
    from transformers import PreTrainedTokenizerFast  # see import_ahead

    try:
        wrapped: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(path)
    except (OSError, ValueError):
        raise
    except Exception as error:  # what the Rust side raises has no type of its own
        raise ValueError(f"tokenizer.json cannot be read: {error}") from error
    return wrapped


def read_json(path: str, name: str) -> dict[str, Any] | None:
    """A JSON object of the model, or None when the model has no such file."""
    from transformers.utils.hub import cached_file

    found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    if found is None:
        return None
    content = json.loads(Path(found).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{found} holds no JSON object")
    return content
