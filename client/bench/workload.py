"""What is asked of a server: requests, read from a file or made up from a seed.

Every request is greedy, goes on after the end of a sequence and gets exactly `max_new` tokens, so
that two systems that are compared do the same work. When each is sent is arrivals.py's matter.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from client.bench.lengths import Lengths


class BadWorkload(ValueError):
    """The file cannot be replayed; `str()` names file, line and what is wanted."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    id: str
    prompt: tuple[int, ...]  # token ids
    max_new: int  # output tokens
    priority: int = 0  # lower first


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A recipe; the same one gives the same requests."""

    num_requests: int
    prompt: Lengths
    output: Lengths
    vocab_size: int
    seed: int
    shared_prefix: int = 0  # tokens that come before the prompt proper …
    num_prefixes: int = 1  # … one of so many, drawn for each request
    num_priorities: int = 1  # 0 to this - 1, drawn for each request

    def describe(self) -> str:
        parts = [f"{self.num_requests} requests, prompts {self.prompt}, outputs {self.output}"]
        if self.shared_prefix:
            parts.append(f"behind one of {self.num_prefixes} prefixes of {self.shared_prefix}")
        if self.num_priorities > 1:
            parts.append(f"{self.num_priorities} priorities")
        return ", ".join([*parts, f"seed {self.seed}"])


def make_up(recipe: Synthetic) -> list[Ask]:
    """Random tokens in the given lengths; token ids from 3 on, as the first are often special."""
    source = random.Random(recipe.seed)

    def tokens(count: int) -> list[int]:
        return [source.randrange(min(3, recipe.vocab_size - 1), recipe.vocab_size)
                for _ in range(count)]  # fmt: skip

    prefixes = [tokens(recipe.shared_prefix) for _ in range(recipe.num_prefixes)]
    return [
        Ask(
            id=str(number),
            prompt=(*source.choice(prefixes), *tokens(recipe.prompt.draw(source))),
            max_new=recipe.output.draw(source),
            priority=source.randrange(recipe.num_priorities),
        )
        for number in range(recipe.num_requests)
    ]


def read_workload(path: Path) -> list[Ask]:
    """JSON lines {"id", "prompt": [token ids], "max_new", "priority" if any}.

    Raises BadWorkload, or OSError where the file cannot be read.
    """
    asks: list[Ask] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            asks.append(_ask(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise BadWorkload(
                f'{path}, line {number}: wanted {{"id", "prompt": [token ids], "max_new": '
                f"1 or more}} ({type(error).__name__}: {error})"
            ) from None
    if not asks:
        raise BadWorkload(f"{path} holds no request")
    if len({ask.id for ask in asks}) < len(asks):
        raise BadWorkload(f"{path} holds two requests with the same id")
    return asks


def write_workload(path: Path, asks: list[Ask]) -> None:
    """As `read_workload` reads it."""
    path.write_text("".join(json.dumps(asdict(ask)) + "\n" for ask in asks), encoding="utf-8")


def _ask(row: dict[str, Any]) -> Ask:
    ask = Ask(str(row["id"]), tuple(row["prompt"]), row["max_new"], row.get("priority", 0))
    whole = (*ask.prompt, ask.max_new, ask.priority)
    if not ask.prompt or not all(type(number) is int for number in whole) or ask.max_new < 1:
        raise ValueError("a prompt of at least one whole number, max_new of at least 1")
    return ask
