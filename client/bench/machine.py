"""The machine and the software of a measurement: without them a figure cannot be repeated."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

_DISTRIBUTIONS = ("chairlift", "grpcio", "protobuf", "numpy", "torch", "transformers")


def describe_machine() -> dict[str, str | int | float]:
    """Processor, cores, memory and system, as far as the system reveals them."""
    affinity = getattr(os, "sched_getaffinity", None)
    memory = re.search(r"MemTotal: +(\d+) kB", _read("/proc/meminfo"))
    processor = re.search(r"model name\s*: (.+)", _read("/proc/cpuinfo"))
    return {
        "processor": processor[1] if processor else platform.processor() or "unknown",
        "cores": len(affinity(0)) if affinity else os.cpu_count() or 1,
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else 0.0,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Versions of the installed distributions that influence a measurement."""
    found = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str | None:
    """The git commit of this source tree, with "-dirty" appended if it was modified; None outside
    a checkout."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(
            command,
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _read(path: str) -> str:
    """The file, or nothing on a system that has no such file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
