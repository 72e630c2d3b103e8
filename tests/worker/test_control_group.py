"""The limits of containers and units, from file systems of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.process.control_group import free_memory, usable_threads

GIB = 2**30
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"
NO_LIMIT = 0x7FFFFFFFFFFFF000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def of(root: Path, *lines: str) -> None:
    (root / "proc/self/cgroup").write_text("\n".join(lines) + "\n")


def group(root: Path, path: str, **files: object) -> None:
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_page_cache_is_not_in_use(root):
    """The checkpoint that was just read fills it: a container would seem full, and get a pool of
    nothing."""
    of(root, "0::/")
    stat = f"anon {GIB}\ninactive_file {4 * GIB}\nactive_file {2 * GIB}\nfile {6 * GIB}"
    group(root, V2, memory__max=8 * GIB, memory__current=7 * GIB, memory__stat=stat)
    assert free_memory(root) == 7 * GIB  # a file that is read again, after a restart, is active


def test_the_least_of_all_groups_above_counts(root):
    """A unit's MemoryMax lies in its own group, a pod's above that of its container."""
    of(root, "0::/system.slice/chairlift.service")
    group(root, V2, memory__stat="")  # the root group has no limit and no use
    group(root, f"{V2}/system.slice", memory__max="max", memory__current=3 * GIB)
    unit = f"{V2}/system.slice/chairlift.service"
    group(root, unit, memory__max=4 * GIB, memory__current=GIB)
    assert free_memory(root) == 3 * GIB
    group(root, f"{V2}/system.slice", memory__max=5 * GIB, memory__current=3 * GIB)
    assert free_memory(root) == 2 * GIB
    group(root, unit, memory__high=2 * GIB)
    assert free_memory(root) == 1 * GIB


def test_version_1(root):
    """Its files have other names, and no limit is a huge number."""
    of(root, "5:cpu,cpuacct:/", "4:memory:/docker/abc", "0::/")
    group(root, V1, memory__limit_in_bytes=NO_LIMIT, memory__usage_in_bytes=9 * GIB)
    inside = f"{V1}/docker/abc"
    group(root, inside, memory__limit_in_bytes=NO_LIMIT, memory__usage_in_bytes=GIB)
    assert free_memory(root) is None
    stat = f"inactive_file 5\ntotal_inactive_file {GIB}"
    group(root, inside, memory__limit_in_bytes=3 * GIB, memory__stat=stat)
    group(root, inside, memory__usage_in_bytes=2 * GIB)
    assert free_memory(root) == 2 * GIB


def test_a_container_may_see_its_own_group_as_the_root(root):
    """Without a namespace for control groups the path is the host's, the mounted files are not."""
    of(root, "4:memory:/kubepods/pod1/abc")
    group(root, V1, memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB)
    assert free_memory(root) == GIB
    of(root, "0::/../other")
    group(root, V2, memory__max=3 * GIB, memory__current=GIB)
    assert free_memory(root) == 2 * GIB


@pytest.mark.parametrize(
    ("mount", "line"),
    [
        ("sys/fs/cgroup", "30 24 0:27 /docker/abc {} ro,nosuid - cgroup2 cgroup rw"),
        ("sys/fs/cgroup/memory", "31 30 0:28 /docker/abc {} ro shared:9 - cgroup cgroup rw,memory"),
        ("somewhere else/cg", "31 30 0:28 /docker/abc {} ro - cgroup2 none rw"),
    ],
)
def test_a_unit_in_a_container_is_found(root, mount, line):
    """The path in /proc is the host's, the mounted tree begins at the container's group, and the
    unit that limits the worker lies below that."""
    path = "/docker/abc/system.slice/chairlift.service"
    of(root, f"4:memory:{path}" if "memory" in line else f"0::{path}")
    mounted = ("/" + mount).replace(" ", "\\040")
    (root / "proc/self/mountinfo").write_text("nonsense\n" + line.format(mounted) + "\n")
    files = {"memory__max": 2 * GIB, "memory__current": GIB}
    if "memory" in line:
        files = {"memory__limit_in_bytes": 2 * GIB, "memory__usage_in_bytes": GIB}
    group(root, f"{mount}/system.slice/chairlift.service", **files)
    assert free_memory(root) == GIB


def test_no_limit_is_none(root):
    """Also where there are no such files at all, or none that can be read."""
    assert free_memory(root) is None
    of(root, "0::/", "nonsense", "")
    group(root, V2, memory__max="max", memory__current=GIB)
    assert free_memory(root) is None
    group(root, V2, memory__max="?", memory__current="?")
    assert free_memory(root) is None


def test_more_in_use_than_allowed_is_nothing_free(root):
    """A limit may have been lowered."""
    of(root, "0::/")
    group(root, V2, memory__max=GIB, memory__current=2 * GIB)
    assert free_memory(root) == 0


def test_threads_within_a_quota(root):
    """64 threads on the time of two CPUs stop together for most of every period."""
    assert usable_threads(64, root) == 64
    of(root, "0::/a/b")
    group(root, f"{V2}/a/b", cpu__max="max 100000")
    assert usable_threads(64, root) == 64
    group(root, f"{V2}/a", cpu__max="250000 100000")
    assert usable_threads(64, root) == 3
    assert usable_threads(2, root) == 2
    group(root, f"{V2}/a/b", cpu__max="50000 100000")
    assert usable_threads(64, root) == 1


def test_threads_within_a_quota_of_version_1(root):
    """Mounted under one controller's name, or under all of them."""
    of(root, "3:cpu,cpuacct:/x", "2:cpuset:/")
    files = {"cpu.cfs_quota_us": 200000, "cpu.cfs_period_us": 100000}
    group(root, "sys/fs/cgroup/cpu,cpuacct/x", **files)
    assert usable_threads(64, root) == 2
    group(root, "sys/fs/cgroup/cpu,cpuacct/x", **{**files, "cpu.cfs_quota_us": -1})
    assert usable_threads(64, root) == 64
