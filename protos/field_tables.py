"""Writes the tables of the API's fields into README.md and docs/sampling.md: run
`python -m protos.field_tables` after a change of sampling.py or api_fields.py (a test compares).

A table stands between two comments of its page, `<!-- table NAME … -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from protos.api_fields import GENERATE_FIELDS, OTHER_SAMPLING_FIELDS, ApiField
from protos.sampling import REQUEST_FIELDS, SAMPLER_FIELDS, SAMPLING_FIELDS, SamplingField

PAGES: Final = ("README.md", "docs/sampling.md")
_TABLE: Final = re.compile(r"(<!-- table (\w+)[^>]*-->\n)(.*?)(<!-- end -->)", re.DOTALL)
_SERVER_CHOOSES: Final = {"max_tokens": "as many as fit", "seed": "drawn by the server"}


def updated(page: str) -> str:
    """The page with its tables as they should be."""
    return _TABLE.sub(lambda found: found[1] + "\n" + _TABLES[found[2]]() + "\n" + found[4], page)


def _defaults() -> str:
    """Of every field: the default and where it comes from."""
    fields = {f"sampling.{name}": entry for name, entry in SAMPLING_FIELDS.items()}
    others = {f"sampling.{name}": entry for name, entry in OTHER_SAMPLING_FIELDS.items()}
    rows = (
        (f"`{name}`", _default(name.removeprefix("sampling."), entry), _source(entry))
        for name, entry in (fields | others | GENERATE_FIELDS).items()
        if name != "sampling"
    )
    return _table(("field", "default", "the model's own, from generation_config.json"), rows)


def _numbers(fields: Mapping[str, SamplingField]) -> str:
    head = ("field", "neutral", "allowed", "model's default", "effect")
    return _table(
        head,
        (
            (
                f"`{name}`",
                "" if entry.neutral is None else f"{entry.neutral:g}",
                entry.allowed,
                _source(entry),
                entry.effect,
            )
            for name, entry in fields.items()
        ),
    )


def _others(fields: Mapping[str, ApiField]) -> str:
    head = ("field", "default", "allowed", "model's default", "effect")
    return _table(
        head,
        (
            (f"`{name}`", entry.default, entry.allowed, _source(entry), entry.effect)
            for name, entry in fields.items()
        ),
    )


def _default(name: str, entry: SamplingField | ApiField) -> str:
    if isinstance(entry, ApiField):
        return entry.default
    if name in _SERVER_CHOOSES:
        return _SERVER_CHOOSES[name]
    return "none" if entry.neutral is None else f"{entry.neutral:g}"


def _source(entry: SamplingField | ApiField) -> str:
    return ", ".join(f"`{key}`" for key in entry.config_key.split(", ") if key)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cells)} |\n" for cells in (head, *rows)]
    return "".join([lines[0], "|---" * len(head) + "|\n", *lines[1:]])


_TABLES: Final[dict[str, Callable[[], str]]] = {
    "defaults": _defaults,
    "sampler": lambda: _numbers(SAMPLER_FIELDS),
    "scheduler": lambda: _numbers(REQUEST_FIELDS),
    "others": lambda: _others(OTHER_SAMPLING_FIELDS),
    "generate": lambda: _others(GENERATE_FIELDS),
}


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    for name in PAGES:
        page = root / name
        page.write_text(updated(page.read_text()))


if __name__ == "__main__":
    main()
