"""The wheel that users get: what is in it, and that it works where nothing else is installed."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=120,
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds the wheel and its base dependencies, no more."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    packages = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True, timeout=120)
    for name in closure(base_requirements(packages)):
        link_distribution(name, packages)
    return python


def base_requirements(packages: Path) -> set[str]:
    """What the wheel declares without any extra."""
    (distribution,) = importlib.metadata.distributions(name="chairlift", path=[str(packages)])
    return {required(line) for line in distribution.requires or [] if "extra ==" not in line}


def closure(names: set[str]) -> set[str]:
    """Those distributions and what they need in turn."""
    known: set[str] = set()
    while names - known:
        name = (names - known).pop()
        known.add(name)
        lines = importlib.metadata.requires(name) or []
        names = names | {required(line) for line in lines if ";" not in line}
    return known


def required(line: str) -> str:
    found = re.match(r"[\w.-]+", line)
    assert found is not None, line
    return found[0]


def link_distribution(name: str, packages: Path) -> None:
    """From the environment that runs the tests, so that no package index is needed."""
    for file in importlib.metadata.files(name) or []:
        if ".." not in file.parts and "__pycache__" not in file.parts:
            target = packages / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(Path(str(file.locate())))


def run(program: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [program, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_wheel_holds_the_four_packages_only(wheel: Path) -> None:
    """A top-level `tests` or `docs` in site-packages would clash with everybody else's."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "client",
        "protos",
        "scheduler_svc",
        "worker",
    }
    assert not [name for name in names if "/tests/" in name or "__pycache__" in name]


def test_every_file_of_the_packages_is_in_it(wheel: Path) -> None:
    """Builders drop what git ignores: a missing .c or .proto shows only on users' machines."""
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    here = {
        str(path.relative_to(ROOT))
        for package in ("client", "protos", "scheduler_svc", "worker")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert here - inside == set()


def test_the_base_install_is_a_client(clean_python: Path, tmp_path: Path) -> None:
    """grpcio and protobuf must do: the client goes into programs that serve no model."""
    code = (
        "import client, protos, scheduler_svc, worker, sys; "
        "assert 'site-packages' in client.__file__, client.__file__; "
        "assert not {'numpy', 'torch'} & set(sys.modules); "
        "client.Chairlift('localhost:1').close()"
    )
    done = run(clean_python, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_command_works_in_the_base_install(clean_python: Path, tmp_path: Path) -> None:
    """Its options, and a plain word about what else to install."""
    command = clean_python.with_name("chairlift")
    done = run(command, "--version", cwd=tmp_path)
    assert done.stdout == f"chairlift {version()}\n", done.stderr
    done = run(command, "serve", cwd=tmp_path)
    assert done.returncode == 1
    assert "pip install 'chairlift[scheduler]'" in done.stderr


def version() -> str:
    found = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]
