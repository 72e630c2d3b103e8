"""Memory and CPU limits of the process: Linux's control groups, both versions.

A process is in a group, and every group above limits it too: a systemd unit in a slice, a container
in a pod. The tightest of them counts. Page cache counts towards a group's memory, but the kernel
reclaims it before a limit is hit: mostly it is a checkpoint that was just read, or, after a
restart, one read before, which counts as active.

Owns: reading /proc/self/cgroup, /proc/self/mountinfo and what is mounted there. Does not own: what
follows from the limits (pool_size.py, __main__.py). Standard library only. `root` is the root of
the file system; tests make their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

_ROOT: Final = Path("/")
_UNLIMITED: Final = 2**60  # version 1 expresses "none" as the largest number of pages


def free_memory(root: Path = _ROOT) -> int | None:
    """Bytes that the process may allocate before a limit is hit; None if there is no limit."""
    version_2 = _left(root, "", ("memory.max", "memory.high"), "memory.current", "")
    version_1 = _left(root, "memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")
    return min([*version_2, *version_1], default=None)


def usable_threads(wanted: int, root: Path = _ROOT) -> int:
    """`wanted`, or as many threads as the CPU quota lets run at once, if that is less. More would
    be throttled together for a part of every period."""
    quotas = [*_quotas(root)]
    return min([wanted, *(max(1, math.ceil(quota)) for quota in quotas)])


def _left(
    root: Path, controller: str, limits: tuple[str, ...], usage: str, of_all_below: str
) -> Iterator[int]:
    for group in _groups(root, controller):
        bounds = [bound for name in limits if (bound := _number(group / name)) is not None]
        used = _number(group / usage)
        if used is None or min(bounds, default=_UNLIMITED) >= _UNLIMITED:
            continue
        cached = (
            _entry(group / "memory.stat", f"{of_all_below}{kind}_file")
            for kind in ("inactive", "active")
        )
        used -= min(used, sum(cached))
        yield max(0, min(bounds) - used)


def _quotas(root: Path) -> Iterator[float]:
    """The number of CPUs that each group's quota is worth."""
    for group in _groups(root, ""):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            yield int(quota) / int(period)
    for group in _groups(root, "cpu"):
        old_quota, old_period = (_number(group / f"cpu.cfs_{x}_us") for x in ("quota", "period"))
        if old_quota is not None and old_quota > 0 and old_period:
            yield old_quota / old_period


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the process's group and of all above it; `controller` "" for version 2. Some may
    not exist."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller not in controllers.split(","):
            continue
        for folder, first in _mounts(root, controller, controllers):
            parts = PurePosixPath(path).parts[1:]
            if parts[: len(first)] == first:
                parts = parts[len(first) :]
            for length in range(0 if ".." in parts else len(parts), -1, -1):
                yield folder.joinpath(*parts[:length])


def _mounts(
    root: Path, controller: str, controllers: str
) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Where the controller's tree is mounted, and the path of its topmost group: inside a container
    that may be the container's own group, while paths are the host's."""
    is_known = False
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        columns, kinds = mount.split(" "), kind.split(" ")
        if len(columns) < 5 or len(kinds) < 3:
            continue
        of_version_1 = kinds[0] == "cgroup" and controller in kinds[2].split(",")
        if of_version_1 if controller else kinds[0] == "cgroup2":
            is_known = True
            folder = columns[4].replace("\\040", " ")
            yield root / folder.lstrip("/"), PurePosixPath(columns[3]).parts[1:]
    if not is_known:
        for name in sorted({controller, controllers} if controller else {"", "unified"}):
            yield root / "sys/fs/cgroup" / name, ()


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, ValueError):
        return ""


def _number(file: Path) -> int | None:
    """None for a missing file, or "max"."""
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
