"""Who may import whom, and how big a file may get. Read from the source, nothing is imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("protos", "scheduler_svc", "worker", "client")
MAX_LINES = 400
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "misc"}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def hand_written(*folders: str) -> list[Path]:
    return [path for path in sources(*folders) if "_pb2" not in path.name]


def imported(path: Path) -> set[str]:
    """Full names of all modules that a file imports, wherever in the file it does."""
    names: set[str] = set()
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*start, *([node.module] if node.module else [])])
            names.add(module)
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def top_level(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", sources("scheduler_svc", "worker", "client"), ids=relative)
def test_the_three_parts_know_only_protos(path: Path) -> None:
    """Without it one process could not be installed, tested or replaced without the others."""
    own = path.relative_to(ROOT).parts[0]
    assert top_level(path).isdisjoint(set(PACKAGES) - {own, "protos"} | {"tests"})


@pytest.mark.parametrize("path", sources("protos"), ids=relative)
def test_protos_knows_nobody(path: Path) -> None:
    """Contracts that import an implementation would drag it into every process."""
    assert top_level(path).isdisjoint(set(PACKAGES) - {"protos"} | {"tests"})


@pytest.mark.parametrize("path", sources("scheduler_svc/core"), ids=relative)
def test_the_core_is_pure(path: Path) -> None:
    """The core must be simulated anywhere: no zmq, no grpc, no clock of a library."""
    strangers = {
        name
        for name in imported(path)
        if name.partition(".")[0] not in sys.stdlib_module_names | {"numpy"}
        and not name.startswith("scheduler_svc.core")
        and name not in {"scheduler_svc", "protos", "protos.plan", "protos.sampling"}
        and not name.startswith(("protos.plan.", "protos.sampling."))
    }
    assert strangers == set()


@pytest.mark.parametrize("path", sources("client"), ids=relative)
def test_the_client_needs_grpc_and_protobuf_only(path: Path) -> None:
    """A service that only talks to Chairlift must not have to install an inference stack."""
    optional = {"rich"}
    allowed = sys.stdlib_module_names | {"client", "protos", "grpc", "google"} | optional
    assert top_level(path) <= allowed
    assert "protos.plan" not in imported(path), "protos.plan needs numpy"


def test_importing_the_client_loads_nothing_heavy() -> None:
    """Catches what reading the imports cannot: a heavy module behind an innocent one."""
    code = (
        "import sys, client, client.aio, client.cli\n"
        "heavy = {'torch', 'numpy', 'transformers', 'zmq', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, cwd="/", timeout=60,
                   env={"PYTHONPATH": str(ROOT)})  # fmt: skip


def test_protos_does_not_import_plan() -> None:
    """`import protos` in the client would then need numpy."""
    assert "protos.plan" not in imported(ROOT / "protos/__init__.py")


@pytest.mark.parametrize("path", hand_written(*PACKAGES, "tests"), ids=relative)
def test_a_file_holds_one_idea(path: Path) -> None:
    """Long files and vague names are where a second idea hides."""
    assert len(path.read_text().splitlines()) <= MAX_LINES
    assert VAGUE_NAMES.isdisjoint({path.stem, path.parent.name})


@pytest.mark.parametrize("path", hand_written(*PACKAGES), ids=relative)
def test_no_module_is_named_like_a_library(path: Path) -> None:
    """`client/grpc.py` would be the grpc that its neighbours import when run as a script."""
    third_party = {"grpc", "google", "numpy", "torch", "zmq", "transformers", "tokenizers", "rich"}
    allowed = {"__init__", "__main__", "tokenizer"}
    assert path.stem in allowed or path.stem not in sys.stdlib_module_names | third_party


CLOCKS = {"perf_counter", "perf_counter_ns", "process_time", "thread_time", "monotonic_ns"}


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=relative)
def test_no_test_asserts_how_long_something_took(path: Path) -> None:
    """One that does fails on the first other machine it meets. Optimised parts are compared with
    their plain twins in turns, in tests/bench, by `make guards`; a deadline may use monotonic."""
    if path.is_relative_to(ROOT / "tests/bench") or path.is_relative_to(ROOT / "tests/gpu"):
        return
    nodes = ast.walk(ast.parse(path.read_text()))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert CLOCKS.isdisjoint(names | {name.rpartition(".")[2] for name in imported(path)})
