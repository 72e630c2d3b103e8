"""RESULTS.md: the figures of one run, with all that is needed to judge and to repeat them."""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
import transformers

from tests.gpu.card import DEVICE, IS_CUDA

PATH: Final = Path(__file__).with_name("RESULTS.md")
_HEAD: Final = """# What the GPU tests measured

Written by `python -m pytest tests/gpu`. The weights are random: tokens mean nothing, times do.
"""


@dataclass(slots=True)
class Table:
    title: str
    columns: Sequence[str]
    note: str = ""
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        assert len(cells) == len(self.columns), (self.title, cells)
        self.rows.append([str(cell) for cell in cells])

    def lines(self) -> list[str]:
        cells = [list(self.columns), ["---"] * len(self.columns), *self.rows]
        lines = ["| " + " | ".join(row) + " |" for row in cells]
        return [f"## {self.title}", "", *([self.note, ""] if self.note else []), *lines, ""]


@dataclass(slots=True)
class Results:
    tables: list[Table] = field(default_factory=list)

    def table(self, title: str, columns: Sequence[str], note: str = "") -> Table:
        self.tables.append(Table(title, columns, note))
        return self.tables[-1]

    def text(self, command: str, outcome: str, seconds_by_part: dict[str, float]) -> str:
        run = Table("The run", ["what", "which"])
        for name, value in environment().items():
            run.add(name, value)
        run.add("command", f"`{command}`")
        run.add("outcome", outcome)
        parts = Table("Time of each part", ["part", "seconds"])
        for part, seconds in seconds_by_part.items():
            parts.add(part, f"{seconds:.0f}")
        tables = [run, *self.tables, parts]
        return "\n".join([_HEAD, *(line for table in tables for line in table.lines())])


def environment() -> dict[str, str]:
    """Hardware, versions, date and commit."""
    name, driver = str(DEVICE), "none"
    if IS_CUDA and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(DEVICE)
        name = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = _first_line(query)
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "none"
    return {
        "GPU": name,
        "driver": driver,
        "CUDA of torch": str(torch.version.cuda),
        "torch": torch.__version__,
        "triton": triton,
        "transformers": transformers.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _first_line(["git", "-C", str(PATH.parent), "describe", "--always", "--dirty"]),
    }


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.partition("\n")[0].strip() or "unknown"
