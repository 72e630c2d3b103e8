"""Building the C kernels where compilers, users and folders are not the usual ones."""

from __future__ import annotations

import ctypes
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from worker.kernels import build
from worker.kernels.build import KernelUnavailable, kernel_library

SOURCE = """
#ifdef _OPENMP
int threads(void) { return 2; }
#else
int threads(void) { return 1; }
#endif
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a source that compiles at once in the place of all kernels."""
    (tmp_path / "small.c").write_text(SOURCE)
    monkeypatch.setattr(build, "_SOURCES", (tmp_path / "small.c",))
    monkeypatch.setattr(build, "_loaded", {})
    return tmp_path / "cache"


@pytest.fixture
def refusing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes CC a compiler that does not know some flags; gives a file of its calls."""

    def make(*flags: str) -> Path:
        real = shutil.which("cc")
        assert real is not None
        calls, script = tmp_path / "calls", tmp_path / "picky"
        script.write_text(
            f'#!/bin/sh\necho "$@" >> {calls}\n'
            f'for flag in "$@"; do for other in {" ".join(flags) or "none"}; do\n'
            f'[ "$flag" = "$other" ] && echo "unknown $flag" >&2 && exit 1\ndone; done\n'
            f'exec {real} "$@"\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("CC", str(script))
        return calls

    return make


def threads(library: ctypes.CDLL) -> int:
    return int(library.threads())


@pytest.mark.parametrize("flags", ["-m64 -O1", '-DNAME="two words"', ""])
def test_a_compiler_may_be_several_words(cache, monkeypatch, tmp_path, flags):
    """`CC="gcc -m64"` and `CC="ccache gcc"` are what distributions and build farms set."""
    (tmp_path / "wrapper").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "wrapper").chmod(0o755)
    monkeypatch.setenv("CC", f"{tmp_path / 'wrapper'} cc {flags}")
    assert threads(kernel_library(cache)) == 2


@pytest.mark.parametrize("refused", [["-march=native"], ["-march=native", "-mcpu=native"]])
def test_a_compiler_without_a_flag_for_this_cpu(cache, refusing, caplog, refused):
    """Slower kernels are better than none."""
    refusing(*refused)
    assert threads(kernel_library(cache)) == 2
    assert not caplog.records


def test_a_compiler_without_openmp(cache, refusing, caplog, monkeypatch):
    """One thread is said to be one, at every start; and the library does not pass for one of
    several threads when the compiler has learnt to build that."""
    refusing("-fopenmp")
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "worker.kernels.build"):
            assert threads(kernel_library(cache)) == 1
        assert "run on one thread" in caplog.text
        assert "unknown -fopenmp" in caplog.text
        build._loaded.clear()
    assert len(list(cache.iterdir())) == 1
    calls = refusing()
    assert threads(kernel_library(cache)) == 2
    assert "-fopenmp" in calls.read_text()


def test_a_library_that_was_cut_short_is_built_again(cache, monkeypatch):
    """To load it would be a bus error, at every start."""
    kernel_library(cache)
    (library,) = cache.glob("*.so")
    whole = library.read_bytes()
    library.unlink()  # it is mapped
    for length in (1000, 0):
        library.write_bytes(whole[:length])
        monkeypatch.setattr(build, "_loaded", {})
        assert threads(kernel_library(cache)) == 2
        (library,) = cache.glob("*.so")
        assert library.stat().st_size == len(whole)
        library.unlink()


def test_what_is_in_the_cache_needs_no_compiler(cache, refusing):
    """Every start but the first."""
    calls = refusing()
    kernel_library(cache)
    build._loaded.clear()
    calls.unlink()
    kernel_library(cache)
    assert not calls.exists()


@pytest.mark.parametrize("command", ["/no/such/compiler", "'cc", "false"])
def test_no_compiler_is_one_kind_of_error(cache, monkeypatch, command):
    """Whoever asks for a kernel can do without, and says why."""
    monkeypatch.setenv("CC", command)
    with pytest.raises(KernelUnavailable, match=command.lstrip("'")):
        kernel_library(cache)


@pytest.mark.parametrize("own", ["", "~nobody-of-this-name/cache"])
def test_a_user_without_a_home(cache, monkeypatch, own):
    """A container's user has no entry among the users and no HOME: the kernels are built for this
    process alone."""

    def no_home(*_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("CHAIRLIFT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    if own:
        monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", own)
    monkeypatch.setattr(Path, "home", no_home)
    assert threads(kernel_library()) == 2
    build._build_ahead()
