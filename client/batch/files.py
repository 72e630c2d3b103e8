"""The two files of a batch: requests that are read as they are needed, and results that survive.

The output is only ever appended to, a line by one write: whatever ends the process, all lines but
the last are whole. It is brought to disk every few seconds and at the end, so that a power cut
costs seconds of work, which the next run does again.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

SYNC_SECONDS: Final = 5.0


class BatchFileError(Exception):
    """A file that is no batch, or not this one; the message names the place."""


def custom_ids(path: Path) -> dict[str, int]:
    """The line number of each request, by custom_id. Raises BatchFileError for a line that is no
    JSON object, has no custom_id, or has one that occurred before."""
    numbers: dict[str, int] = {}
    for number, line in _lines(path):
        custom_id = line.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            raise BatchFileError(
                f"{path}, line {number}: custom_id is {custom_id!r}; allowed: a text of its own"
            )
        if custom_id in numbers:
            raise BatchFileError(
                f"{path}, line {number}: custom_id {custom_id!r} is already that of line "
                f"{numbers[custom_id]}"
            )
        numbers[custom_id] = number
    return numbers


def requests_but(path: Path, finished: set[str]) -> Iterator[dict[str, Any]]:
    """The parsed lines in order, without those whose custom_id is in `finished`."""
    return (line for _, line in _lines(path) if line["custom_id"] not in finished)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, data in enumerate(file, start=1):
            text = data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data
            if not text.strip():
                continue
            line = _parsed(text)
            if line is None:
                raise BatchFileError(f"{path}, line {number} is no JSON object")
            yield number, line


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(data)
    except ValueError:  # of JSON, or of UTF-8
        return None
    return line if isinstance(line, dict) else None


class Results:
    """The output file, open for one run; `finished` are the custom_ids that it has results of."""

    def __init__(self, path: Path, known: dict[str, int], *, drops_failed: bool) -> None:
        """`known`: all custom_ids of the input. With `drops_failed` results that are errors are
        removed. Raises BatchFileError if the file holds anything but results of this input."""
        self.finished: set[str] = set()
        self.num_failed = 0  # of those
        self._path = path
        self._file: BinaryIO = path.open("a+b")
        try:
            self._lock()
            kept = self._read(known, drops_failed)
            if kept is not None:
                self._replace(kept)
        except BaseException:
            self._file.close()
            raise
        self._synced = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sync()
        self._file.close()

    def append(self, line: dict[str, Any]) -> None:
        """Writes one result."""
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BatchFileError(f"{self._path}: another batch is writing it") from None

    def _read(self, known: dict[str, int], drops_failed: bool) -> list[bytes] | None:
        """Notes what is finished, and repairs the last line. The lines to keep, if not all."""
        self._file.seek(0)
        kept: list[bytes] = []
        is_changed = False
        for number in itertools.count(1):
            start = self._file.tell()
            data = self._file.readline()
            if not data:
                break
            line = _parsed(data)
            is_whole = data.endswith(b"\n")
            if line is None and not is_whole:  # cut off in the middle
                self._file.truncate(start)
                break
            custom_id = None if line is None else line.get("custom_id")
            if line is None or "response" not in line or custom_id not in known:
                raise BatchFileError(
                    f"{self._path}, line {number} is no result of this input; name another file"
                )
            if not is_whole:
                self._file.write(b"\n")
                data += b"\n"
            is_failed = line.get("error") is not None
            if is_failed and drops_failed:
                is_changed = True
                continue
            self.finished.add(custom_id)
            self.num_failed += is_failed
            if drops_failed:
                kept.append(data)
        return kept if is_changed else None

    def _replace(self, kept: list[bytes]) -> None:
        """Puts a new file with those lines into the old one's place, once it is whole."""
        path = self._path.with_name(self._path.name + ".new")
        with path.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path, self._path)
        self._file.close()
        self._file = self._path.open("a+b")
        self._lock()
