"""The result of one `chairlift bench`: what was measured where, kept as one JSON file.

Figures are derived from the runs and never read back, so that a file of an older version shows
today's figures.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from client.bench.figures import Figures, Limits, figures, median_of
from client.bench.records import Run, known

FORMAT = 1


class NotAResult(ValueError):
    """The file was not written by `chairlift bench --json`."""


@dataclass(slots=True)
class Result:
    """Everything that a report needs."""

    workload: str  # its description
    arrivals: str
    seed: int
    limits: Limits
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    commit: str | None
    started: str  # ISO 8601, UTC
    server: Mapping[str, Any]  # model, version, device, settings
    runs: list[Run] = field(default_factory=list)
    label: str = ""  # its name in a comparison of several files

    def systems(self) -> dict[str, list[Run]]:
        """The runs of each system, in the order of their first run."""
        found: dict[str, list[Run]] = {}
        for run in self.runs:
            found.setdefault(run.system, []).append(run)
        return found

    def figures(self) -> dict[str, Figures]:
        """Medians over the turns, by system."""
        return {
            system: median_of([figures(run, self.limits) for run in runs])
            for system, runs in self.systems().items()
        }

    def ratios(self) -> dict[str, float]:
        """Chairlift's output tokens per second over those of each other system.

        The median of the ratios of each turn: a machine that slows down during the measurement
        slows both systems of a turn alike.
        """
        rates = {
            system: [figures(run, self.limits).output_tokens_per_second for run in runs]
            for system, runs in self.systems().items()
        }
        own = rates.pop("chairlift", [])
        ratios = {
            system: [mine / other for mine, other in zip(own, others, strict=False) if other > 0]
            for system, others in rates.items()
        }
        return {system: statistics.median(found) for system, found in ratios.items() if found}

    def write(self, path: Path) -> None:
        """Writes JSON, with the figures added for other programs."""
        content = {
            "format": FORMAT,
            **asdict(self),
            "figures": {name: asdict(found) for name, found in self.figures().items()},
            "ratios": self.ratios(),
        }
        for row, run in zip(content["runs"], self.runs, strict=True):
            row["figures"] = asdict(figures(run, self.limits))
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_result(path: Path) -> Result:
    """Raises NotAResult, or OSError if the file cannot be read."""
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        if row["format"] != FORMAT:
            raise NotAResult(f"{path} has format {row['format']}; allowed: {FORMAT}")
        result = Result(**known(Result, row))
        result.limits = Limits(**row["limits"])
        result.runs = [Run.from_dict(run) for run in row["runs"]]
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise NotAResult(f"{path} is no result of `chairlift bench --json`: {error!r}") from None
    result.label = result.label or path.stem
    return result
