"""Builds the C kernels: with `cc`, on first use, into a cache folder. Standard library only.

All .c files of this folder become one library. Its name contains the hash of source, flags and CPU,
so it is built once per machine, and its size, because loading a library that a full disk or a power
cut has truncated would kill the process. Several processes may start at once: each builds into a
folder of its own and renames the result, so that nobody loads half a library. If the cache is not
writable, or the user has no home for it, the library is built into a temporary folder. A compiler
without OpenMP or the flag for this CPU is used without them. Within a process the library is built
and loaded once; `build_ahead` builds it while the process starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

_FOLDER: Final = Path(__file__).parent
_SOURCES: Final = tuple(sorted(_FOLDER.glob("*.c")))
_HEADERS: Final = tuple(sorted(_FOLDER.glob("*.h")))
# No -ffast-math: linking with it can switch denormals off for the whole process, and it breaks
# -inf. No -fassociative-math, and contraction off (fused operations are written out): the order of
# operations must not depend on how a loop was compiled, see paged.c.
_FLAGS: Final = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fPIC",
)
_PARALLEL: Final = "-fopenmp"
# The first one's name with other compilers; None: code for any CPU of the architecture.
_NATIVE: Final = ("-march=native", "-mcpu=native", None)
_BUILD_SECONDS: Final = 120

Made = TypeVar("Made")

logger = logging.getLogger(__name__)


class KernelUnavailable(RuntimeError):
    """The C kernels cannot be built or loaded here; the message says why."""


class _CompilerFailed(Exception):
    """With the compiler's output."""


_lock = threading.Lock()  # held while building, for which other threads wait
_loaded: dict[Path | None, ctypes.CDLL] = {}


def kernel_library(cache_folder: Path | None = None) -> ctypes.CDLL:
    """All kernels as one library, built if the cache has none. Raises KernelUnavailable."""
    folder = cache_folder or _default_cache_folder()
    with _lock:
        if folder not in _loaded:
            _loaded[folder] = _load(folder)
        return _loaded[folder]


def build_ahead() -> None:
    """Starts building in a thread, if the cache has no library. Errors are ignored here, and raised
    by `kernel_library`.

    The library is not loaded yet: the first library that loads OpenMP determines which one the
    process uses, and that must be torch.
    """
    threading.Thread(target=_build_ahead, name="kernels", daemon=True).start()


def _build_ahead() -> None:
    folder = _default_cache_folder()
    with _lock, contextlib.suppress(OSError, KernelUnavailable):
        if folder is not None:
            _built(folder)


def _load(folder: Path | None) -> ctypes.CDLL:
    """`folder` None: there is no cache."""
    if folder is None:
        return _private_library()
    try:
        return ctypes.CDLL(str(_built(folder)))
    except OSError:  # the folder is not writable, or its library cannot be loaded
        return _private_library()


def _built(folder: Path) -> Path:
    """The library in the cache, built if it is missing."""

    def cached(flags: tuple[str, ...]) -> Path:
        name = f"kernels-{_fingerprint(flags)}"
        for path in folder.glob(f"{name}-*.so"):
            if path.name == f"{name}-{path.stat().st_size}.so":
                return path
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as private:
            built = _build(Path(private), flags)
            return built.rename(folder / f"{name}-{built.stat().st_size}.so")

    return _first_that_compiles(cached)


def _private_library() -> ctypes.CDLL:
    """Built for this process alone; it stays mapped after its file is deleted."""

    def load(flags: tuple[str, ...]) -> ctypes.CDLL:
        with tempfile.TemporaryDirectory() as private:
            return ctypes.CDLL(str(_build(Path(private), flags)))

    try:
        return _first_that_compiles(load)
    except OSError as error:
        raise KernelUnavailable(f"the built library cannot be loaded: {error}") from error


def _first_that_compiles(make: Callable[[tuple[str, ...]], Made]) -> Made:
    """Calls `make` with the best flags that the compiler accepts."""
    errors = []
    for flags in _variants():
        try:
            made = make(flags)
        except _CompilerFailed as error:
            errors.append(str(error))
            continue
        if _PARALLEL not in flags:
            logger.warning(
                "the C kernels run on one thread: %r cannot build with OpenMP (%s)",
                shlex.join(_compiler()),
                errors[0][-200:],
            )
        return made
    raise KernelUnavailable(f"{shlex.join(_compiler())} failed: {errors[0][-500:]}")


def _variants() -> Iterator[tuple[str, ...]]:
    """Sets of flags, the best first. Threads matter more than instruction sets."""
    for parallel in ((_PARALLEL,), ()):
        for native in _NATIVE if _NATIVE[0] in _FLAGS else (None,):
            flags = (native if flag == _NATIVE[0] else flag for flag in _FLAGS)
            yield (*(flag for flag in flags if flag is not None), *parallel)


def _compiler() -> list[str]:
    """$CC may be several words: a wrapper before the compiler, flags after it."""
    text = os.environ.get("CC", "").strip() or "cc"
    try:
        return shlex.split(text)
    except ValueError as error:
        raise KernelUnavailable(f"CC is {text!r}, which is no command: {error}") from error


def _build(folder: Path, flags: tuple[str, ...]) -> Path:
    """Compiles the sources into `folder`. Raises _CompilerFailed, or KernelUnavailable if other
    flags would not help."""
    compiler = _compiler()
    if shutil.which(compiler[0]) is None:
        raise KernelUnavailable(f"there is no C compiler {compiler[0]!r} on PATH")
    built = folder / "kernels.so"
    objects = [str(folder / f"{source.stem}.o") for source in _SOURCES]
    try:
        with ThreadPoolExecutor() as pool:
            commands = (
                [*compiler, *flags, "-c", "-o", target, str(source)]
                for source, target in zip(_SOURCES, objects, strict=True)
            )
            list(pool.map(_run, commands))
        parallel = [flag for flag in flags if flag == _PARALLEL]
        _run([*compiler, "-shared", *parallel, "-o", str(built), *objects, "-lm"])
    except subprocess.CalledProcessError as error:
        raise _CompilerFailed(error.stderr.decode(errors="replace").strip()) from error
    except subprocess.TimeoutExpired:
        raise KernelUnavailable(f"{compiler[0]} took over {_BUILD_SECONDS} s") from None
    return built


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_SECONDS)


def _fingerprint(flags: tuple[str, ...]) -> str:
    """Identifies a build: source, flags, compiler, and CPU, since -march=native depends on it."""
    parts = [
        *(source.read_bytes() for source in (*_SOURCES, *_HEADERS)),
        " ".join([*_compiler(), *flags]).encode(),
        platform.machine().encode(),
        _cpu_features(),
    ]
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).hexdigest()


def _cpu_features() -> bytes:
    """The instruction sets of the first CPU, as far as the system reports them."""
    try:
        text = Path("/proc/cpuinfo").read_bytes()
    except OSError:
        return platform.processor().encode()
    lines = [
        line
        for line in text.split(b"\n\n", 1)[0].splitlines()
        if line.startswith((b"flags", b"Features", b"model name", b"CPU part"))
    ]
    return b"\n".join(lines)


def _default_cache_folder() -> Path | None:
    """Next to the converted models (worker/model/embedded.py); None for a user without a home."""
    own = os.environ.get("CHAIRLIFT_CACHE_DIR")
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        if own:
            return Path(own).expanduser() / "kernels"
        return (Path(shared) if shared else Path.home() / ".cache") / "chairlift" / "kernels"
    except RuntimeError:  # neither HOME nor an entry in the list of users
        return None
