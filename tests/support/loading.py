"""Loads saved tiny models, with settings that suit them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from protos import link_pb2
from worker.model.load import LoadedModel, load_folder

PAGE_SIZE: Final = 4


def configure(**settings: Any) -> link_pb2.Configure:
    """A Configure for a tiny model on the CPU; `settings` override its fields."""
    defaults = {
        "device": "cpu",
        "page_size": PAGE_SIZE,
        "max_batch_tokens": 256,
        "max_requests_per_batch": 32,
        "num_threads": 1,  # tiny models: a second thread costs more than it brings
    }
    return link_pb2.Configure(**{**defaults, **settings})


def load(path: Path, **settings: Any) -> LoadedModel:
    return load_folder(str(path), configure(**settings), lambda _what, _share: None)
