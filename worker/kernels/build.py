"""Building the C kernels: with `cc`, on first use, into a cache folder. Standard library only.

All .c files of this folder become one library. It lies under a name made of the hash of source,
flags and CPU, so it is built once per machine. Several processes may start at once: each builds
into a folder of its own and renames the result, so that nobody loads half a library. A cache that
cannot be written is no obstacle: then the build is used from a temporary folder. Within a process
it is built and loaded once; `build_ahead` does so beside what else a start takes time for.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

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
_BUILD_SECONDS: Final = 120


class KernelUnavailable(RuntimeError):
    """The C kernel cannot be built or loaded here; the message says why."""


_lock = threading.Lock()  # whoever comes while another one builds waits for that
_loaded: dict[Path, ctypes.CDLL] = {}


def kernel_library(cache_folder: Path | None = None) -> ctypes.CDLL:
    """All kernels as one library, built if the cache has none. Raises KernelUnavailable."""
    folder = cache_folder or _default_cache_folder()
    with _lock:
        if folder not in _loaded:
            _loaded[folder] = _load(folder)
        return _loaded[folder]


def build_ahead() -> None:
    """Begin to build in a thread, if the cache has no library. Errors are left to who asks for it.

    It is not loaded yet: the first to load OpenMP decides which one a process has, and that is to
    be torch.
    """
    threading.Thread(target=_build_ahead, name="kernels", daemon=True).start()


def _build_ahead() -> None:
    with _lock, contextlib.suppress(OSError, KernelUnavailable):
        _built(_default_cache_folder())


def _load(folder: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(_built(folder)))
    except OSError:  # the folder cannot be written, or what it holds cannot be loaded
        return _private_library()


def _built(folder: Path) -> Path:
    """The library in the cache, built if it is not there."""
    path = folder / f"kernels-{_fingerprint()}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as private:
            built = _build(Path(private))
            os.replace(built, path)
    return path


def _private_library() -> ctypes.CDLL:
    """Built for this process alone; it stays mapped after its file is gone."""
    try:
        with tempfile.TemporaryDirectory() as private:
            return ctypes.CDLL(str(_build(Path(private))))
    except OSError as error:
        raise KernelUnavailable(f"the built library cannot be loaded: {error}") from error


def _build(folder: Path) -> Path:
    """Compile the sources into `folder`; with OpenMP if the compiler has it."""
    compiler = os.environ.get("CC") or "cc"
    if shutil.which(compiler) is None:
        raise KernelUnavailable(f"there is no C compiler {compiler!r} on PATH")
    built = folder / "kernels.so"
    errors = ""
    for parallel in (("-fopenmp",), ()):
        compile_one = [compiler, *_FLAGS, *parallel, "-c", "-o"]
        objects = [str(folder / f"{source.stem}.o") for source in _SOURCES]
        try:
            with ThreadPoolExecutor() as pool:
                commands = (
                    [*compile_one, target, str(source)]
                    for source, target in zip(_SOURCES, objects, strict=True)
                )
                list(pool.map(_run, commands))
            _run([compiler, "-shared", *parallel, "-o", str(built), *objects, "-lm"])
        except subprocess.CalledProcessError as error:
            errors = errors or error.stderr.decode(errors="replace").strip()
        except subprocess.TimeoutExpired:
            raise KernelUnavailable(f"{compiler} took over {_BUILD_SECONDS} s") from None
        else:
            return built
    raise KernelUnavailable(f"{compiler} failed: {errors[-500:]}")


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_SECONDS)


def _fingerprint() -> str:
    """Names a build: source, flags, compiler's name, and CPU, since -march=native depends on it."""
    parts = [
        *(source.read_bytes() for source in (*_SOURCES, *_HEADERS)),
        " ".join([os.environ.get("CC") or "cc", *_FLAGS]).encode(),
        platform.machine().encode(),
        _cpu_features(),
    ]
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).hexdigest()


def _cpu_features() -> bytes:
    """The instruction sets of the first CPU, where the system tells."""
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


def _default_cache_folder() -> Path:
    """Beside the converted models (worker/embedded.py)."""
    own = os.environ.get("CHAIRLIFT_CACHE_DIR")
    if own:
        return Path(own).expanduser() / "kernels"
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "chairlift" / "kernels"
