"""A model's tokenizer files as a zip archive, for a gateway that cannot read the model's folder."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from scheduler_svc.errors import Unavailable

PIECE_BYTES: Final = 1 << 20
_FILES: Final = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "config.json",
    "generation_config.json",
)  # fmt: skip


def tokenizer_archive(model_path: str) -> tuple[bytes, str]:
    """The zip archive and its SHA-256 in hex; the same files give the same bytes. Raises
    Unavailable where there is no folder to read."""
    found = [path for name in _FILES if (path := Path(model_path) / name).is_file()]
    if not found:
        raise Unavailable(f"no tokenizer files are found in {model_path}")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        for path in found:
            entry = zipfile.ZipInfo(path.name)  # without the file's time
            zipped.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    data = archive.getvalue()
    return data, hashlib.sha256(data).hexdigest()


def pieces(data: bytes) -> Iterator[bytes]:
    """The archive in messages of a size that every client takes."""
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]
