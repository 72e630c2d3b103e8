"""A workload: the requests that a benchmark sends, and the JSON lines file that holds them.

Every request is greedy, ignores the end of sequence and gets exactly `max_new` tokens, so that two
compared systems do the same work. client/bench/arrivals.py decides when each is sent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


class BadWorkload(ValueError):
    """The file is not a workload; `str()` names file, line and what is allowed."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    id: str
    prompt: tuple[int, ...]  # token ids
    max_new: int  # output tokens
    priority: int = 0  # lower runs first


def read_workload(path: Path) -> list[WorkloadRequest]:
    """Reads JSON lines {"id", "prompt": [token ids], "max_new", "priority" (optional)}.

    Raises BadWorkload, or OSError if the file cannot be read.
    """
    requests: list[WorkloadRequest] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            requests.append(_request(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise BadWorkload(
                f'{path}, line {number}: allowed: {{"id", "prompt": [token ids], "max_new": '
                f"1 or more}} ({type(error).__name__}: {error})"
            ) from None
    if not requests:
        raise BadWorkload(f"{path} contains no request")
    if len({request.id for request in requests}) < len(requests):
        raise BadWorkload(f"{path} contains two requests with the same id")
    return requests


def write_workload(path: Path, requests: Sequence[WorkloadRequest]) -> None:
    """Writes what `read_workload` reads."""
    lines = (json.dumps(asdict(request)) + "\n" for request in requests)
    path.write_text("".join(lines), encoding="utf-8")


def _request(row: dict[str, Any]) -> WorkloadRequest:
    request = WorkloadRequest(
        str(row["id"]), tuple(row["prompt"]), row["max_new"], row.get("priority", 0)
    )
    integers = (*request.prompt, request.max_new, request.priority)
    if not request.prompt or not all(type(n) is int for n in integers) or request.max_new < 1:
        raise ValueError("prompt must hold at least one integer, max_new must be at least 1")
    return request
