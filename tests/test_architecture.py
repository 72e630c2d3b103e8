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
        and name not in {"scheduler_svc", "protos"}
        and ".".join(name.split(".")[:2]) not in {"protos.plan", "protos.link", "protos.sampling"}
    }
    assert strangers == set()


@pytest.mark.parametrize("path", sources("client"), ids=relative)
def test_the_client_needs_grpc_and_protobuf_only(path: Path) -> None:
    """A service that only talks to Chairlift must not have to install an inference stack."""
    optional = {"prompt_toolkit", "rich"}
    allowed = sys.stdlib_module_names | {"client", "protos", "grpc", "google"} | optional
    assert top_level(path) <= allowed
    assert "protos.plan" not in imported(path), "protos.plan needs numpy"


# The rooms of a package, floor by floor: a room may import rooms of lower floors. A module beside
# the rooms is a room of its own. A room that has rooms itself may be a package here, too.
FLOORS = {
    "worker": (
        ("process", "kernels", "kv"),
        ("batch",),
        ("attention",),
        ("step", "cpu_layers"),
        ("model",),
        ("memory",),
        ("runner",),
        ("__main__",),
    ),
    "scheduler_svc": (
        ("core", "errors"),
        ("settings", "text", "grammar"),
        ("engine",),
        ("front",),
        ("__main__",),
    ),
    "scheduler_svc.core": (
        ("biases", "history", "limits", "prompt_lookup", "seeds", "step_time"),
        ("drafting",),
        ("request",),
        ("memory", "pending", "policies", "reports", "rows", "suspects"),
        ("state",),
        ("sample_context",),
        ("check", "pack", "step", "wedge"),
        ("scheduler",),
    ),
}


def room_of(module: str, package: str) -> str:
    """The room `kv` of the module `worker.kv.geometry` in the package `worker`."""
    return module.removeprefix(f"{package}.").partition(".")[0]


def arrows(package: str) -> set[tuple[str, str]]:
    """(module, module that it imports) within a package, by full names."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources(package.replace(".", "/"))
    }
    return {
        (module, name)
        for module, path in modules.items()
        for name in imported(path) & modules.keys() - {module, package}
    }


@pytest.mark.parametrize("package", FLOORS)
def test_rooms_import_lower_floors_only(package: str) -> None:
    """An arrow that points upward makes two rooms one: neither is understood without the other.
    And a new room that nobody placed could be imported from anywhere, and import anything."""
    paths = (
        path.relative_to(ROOT / package.replace(".", "/"))
        for path in sources(package.replace(".", "/"))
    )
    floors = {room: floor for floor, rooms in enumerate(FLOORS[package]) for room in rooms}
    assert {path.parts[0].removesuffix(".py") for path in paths} - {"__init__"} == floors.keys()
    upward = [
        f"{module} imports {other}"
        for module, other in sorted(arrows(package))
        if room_of(module, package) != room_of(other, package)
        and floors[room_of(module, package)] <= floors[room_of(other, package)]
    ]
    assert upward == []


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_import_each_other_in_no_circle(package: str) -> None:
    """Modules of a circle can only be read, tested and imported all at once."""
    graph = {module: set[str]() for arrow in arrows(package) for module in arrow}
    for module, other in arrows(package):
        graph[module].add(other)
    while leaves := {module for module, others in graph.items() if not others}:
        graph = {m: others - leaves for m, others in graph.items() if m not in leaves}
    assert graph == {}


def test_importing_the_client_loads_nothing_heavy() -> None:
    """Catches what reading the imports cannot: a heavy module behind an innocent one."""
    code = (
        "import sys, client, client.aio, client.cli\n"
        "heavy = {'torch', 'numpy', 'transformers', 'zmq', 'rich', 'prompt_toolkit'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
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
    third_party = {"grpc", "google", "numpy", "torch", "zmq", "transformers", "tokenizers", "rich",
                   "triton", "psutil", "safetensors"}  # fmt: skip
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
