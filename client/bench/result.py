"""The outcome of one `chairlift bench`: what was measured where, kept as one JSON file.

Figures are derived from the runs, never read back: a file measured with an older version shows
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
from client.bench.records import Run

FORMAT = 1


class NotAResult(ValueError):
    """The file was not written by `chairlift bench --json`."""


@dataclass(slots=True)
class Result:
    """Everything that a report needs."""

    workload: str  # in words
    arrivals: str
    seed: int
    limits: Limits
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    commit: str | None
    started: str  # ISO 8601, UTC
    server: Mapping[str, Any]  # model, version, device, settings
    runs: list[Run] = field(default_factory=list)
    label: str = ""  # how a comparison of several files calls this one

    def systems(self) -> dict[str, list[Run]]:
        """The runs of each system, in the order in which they were first measured."""
        found: dict[str, list[Run]] = {}
        for run in self.runs:
            found.setdefault(run.system, []).append(run)
        return found

    def figures(self) -> dict[str, Figures]:
        """Medians over the turns, of each system."""
        return {
            system: median_of([figures(run, self.limits) for run in runs])
            for system, runs in self.systems().items()
        }

    def ratios(self) -> dict[str, float]:
        """Chairlift's output tokens per second over those of each other system.

        The median of the ratios turn by turn: neighbours in time, so that a machine that gets
        slower during the run does not count.
        """
        systems = self.systems()
        own = systems.get("chairlift", [])
        found = {}
        for system, runs in systems.items():
            if system == "chairlift" or not own:
                continue
            ratios = [
                _rate(mine, self.limits) / rate
                for mine, other in zip(own, runs, strict=False)
                if (rate := _rate(other, self.limits)) > 0
            ]
            if ratios:
                found[system] = statistics.median(ratios)
        return found

    def write(self, path: Path) -> None:
        """As JSON; the figures are there for other programs."""
        content = {
            "format": FORMAT,
            **asdict(self),
            "runs": [
                {**run.as_dict(), "figures": figures(run, self.limits).as_dict()}
                for run in self.runs
            ],
            "figures": {name: found.as_dict() for name, found in self.figures().items()},
            "ratios": self.ratios(),
        }
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_result(path: Path) -> Result:
    """Raises NotAResult, or OSError where the file cannot be read."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["format"] != FORMAT:
            raise NotAResult(f"{path} has format {kept['format']}; this version reads {FORMAT}")
        names = Result.__dataclass_fields__
        known = {name: value for name, value in kept.items() if name in names}
        known["limits"] = Limits(**kept["limits"])
        known["runs"] = [Run.from_dict(run) for run in kept["runs"]]
        result = Result(**known)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise NotAResult(f"{path} is no result of `chairlift bench --json`: {error!r}") from None
    result.label = result.label or path.stem
    return result


def _rate(run: Run, limits: Limits) -> float:
    return figures(run, limits).output_tokens_per_second
