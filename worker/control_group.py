"""What a container or a unit may use of the machine: Linux's control groups, both versions.

A process is in a group, and every group above it limits it too: a systemd unit in a slice, a
container in a pod. What the least of them leaves is what there is. Page cache that is not in use
counts in a group's memory, but the kernel gives it up before a limit is hit: a checkpoint that was
just read is most of it.

Owns: reading /proc/self/cgroup and /sys/fs/cgroup. Does not own: what is done with it (memory.py,
__main__.py). Standard library only. `root` is the file system's; tests have one of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

_ROOT: Final = Path("/")
_UNLIMITED: Final = 2**60  # version 1 writes "none" as the largest number of pages


def free_memory(root: Path = _ROOT) -> int | None:
    """Bytes that the process may take before a limit is hit; None where there is no limit."""
    left = [
        *_left(root, "", ("memory.max", "memory.high"), "memory.current", "inactive_file"),
        *_left(
            root,
            "memory",
            ("memory.limit_in_bytes",),
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ]
    return min(left, default=None)


def usable_threads(wanted: int, root: Path = _ROOT) -> int:
    """`wanted`, or as many as the quota of CPU time lets run at once, if that is less. More would
    be stopped together for a part of every period."""
    quotas = [*_quotas(root)]
    return min([wanted, *(max(1, math.ceil(quota)) for quota in quotas)])


def _left(
    root: Path, controller: str, limits: tuple[str, ...], usage: str, unused: str
) -> Iterator[int]:
    for group in _groups(root, controller):
        bounds = [bound for name in limits if (bound := _number(group / name)) is not None]
        used = _number(group / usage)
        if used is None or min(bounds, default=_UNLIMITED) >= _UNLIMITED:
            continue
        used -= min(used, _entry(group / "memory.stat", unused))
        yield max(0, min(bounds) - used)


def _quotas(root: Path) -> Iterator[float]:
    """CPUs that a group's time is worth."""
    for group in _groups(root, ""):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            yield int(quota) / int(period)
    for group in _groups(root, "cpu"):
        old_quota, old_period = (_number(group / f"cpu.cfs_{x}_us") for x in ("quota", "period"))
        if old_quota is not None and old_quota > 0 and old_period:
            yield old_quota / old_period


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the process's group and of all above it, "" for version 2. Within a container
    the mounted tree may begin at the container's own group, whatever its path says: folders that
    are not there are left out by who reads them."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller not in controllers.split(","):
            continue
        mounts = {"unified", ""} if not controller else {controller, controllers}
        parts = PurePosixPath(path).parts[1:]
        for mount in sorted(mounts):
            for length in range(0 if ".." in parts else len(parts), -1, -1):
                yield root.joinpath("sys/fs/cgroup", mount, *parts[:length])


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, ValueError):
        return ""


def _number(file: Path) -> int | None:
    """None for what is not there, or "max"."""
    try:
        return int(_text(file))
    except ValueError:
        return None


def _entry(file: Path, name: str) -> int:
    for line in _text(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return 0
