"""The CPU backend: plain C through ctypes, built with `cc` on first use and cached.

Owns: building paged.c and calling it. Does not own: arithmetic (paged.c), or when to use it
(worker/attention/__init__.py).

The library lies in a cache folder under a name made of the hash of source, flags and CPU, so it is
built once per machine. Several processes may start at once: each builds into a file of its own and
renames it, so that nobody loads half a library. A cache that cannot be written is no obstacle:
then the build is used from a temporary folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from worker.attention.interface import AttentionCall, GroupTables, StepContext

_SOURCES: Final = tuple(Path(__file__).parent / name for name in ("paged.c", "vectors.h"))
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
    "-shared",
)
_BUILD_SECONDS: Final = 120
_DTYPES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
SUPPORTED_DTYPES: Final = tuple(_DTYPES)


class KernelUnavailable(RuntimeError):
    """The C kernel cannot be built or loaded here; the message says why."""


class CpuBackend:
    """Attention in C. Bitwise independent of batching and chunking."""

    name = "cpu"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._write = library.write_kv
        self._write.restype = None
        self._attend = library.attend
        self._attend.restype = ctypes.c_int

    def write(
        self, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, tables: GroupTables
    ) -> None:
        key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
        strides = (ctypes.c_int64 * 4)(*key.stride()[:2], *value.stride()[:2])
        self._write(
            ctypes.byref(_layer(pages)),
            ctypes.c_void_p(key.data_ptr()),
            ctypes.c_void_p(value.data_ptr()),
            strides,
            ctypes.c_void_p(tables.slot_mapping.data_ptr()),
            ctypes.c_int64(key.shape[0]),
            torch.get_num_threads(),
        )

    def attend(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        context: StepContext,
        tables: GroupTables,
        call: AttentionCall,
    ) -> torch.Tensor:
        if query.stride(-1) != 1:
            query = query.contiguous()
        out = torch.empty(query.shape, dtype=query.dtype)
        sinks = None if call.sinks is None else call.sinks.to(torch.float32).contiguous()
        asked = _Queries(
            q=query.data_ptr(),
            token_stride=query.stride(0),
            head_stride=query.stride(1),
            num_heads=query.shape[1],
            out=out.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            scaling=call.scaling,
            softcap=call.softcap,
            sliding_window=call.sliding_window,
        )
        lengths = _Tables(
            num_requests=len(context.seq_lens),
            query_start_loc=context.query_start_loc.data_ptr(),
            seq_lens=context.seq_lens.data_ptr(),
            table_start=tables.table_start.data_ptr(),
            blocks=tables.blocks.data_ptr(),
            first_positions=tables.first_positions.data_ptr(),
        )
        if self._attend(
            ctypes.byref(_layer(pages)),
            ctypes.byref(asked),
            ctypes.byref(lengths),
            torch.get_num_threads(),
        ):
            raise MemoryError("no memory for the attention kernel's tiles")
        return out


class _Layer(ctypes.Structure):  # struct kv_layer
    _fields_ = [
        ("pages", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    ]


class _Queries(ctypes.Structure):  # struct queries
    _fields_ = [
        ("q", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("sliding_window", ctypes.c_int64),
    ]


class _Tables(ctypes.Structure):  # struct tables
    _fields_ = [
        ("num_requests", ctypes.c_int64),
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("table_start", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("first_positions", ctypes.c_void_p),
    ]


def _layer(pages: torch.Tensor) -> _Layer:
    _, _, num_kv_heads, page_size, head_dim = pages.shape
    return _Layer(
        pages=pages.data_ptr(),
        block_stride=pages.stride(0),
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_dim=head_dim,
        dtype=_DTYPES[pages.dtype],
    )


def load_kernel(cache_folder: Path | None = None) -> CpuBackend:
    """The backend, its library built if the cache has none. Raises KernelUnavailable."""
    folder = cache_folder or _default_cache_folder()
    path = folder / f"paged-{_fingerprint()}.so"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as private:
                built = _build(Path(private))
                os.replace(built, path)
        return _load(path)
    except OSError:  # the folder cannot be written, or what it holds cannot be loaded
        with tempfile.TemporaryDirectory() as private:
            return _load(_build(Path(private)))  # stays mapped after the file is gone


def _load(path: Path) -> CpuBackend:
    try:
        return CpuBackend(ctypes.CDLL(str(path)))
    except AttributeError as error:
        raise OSError(f"{path} lacks a function: {error}") from error


def _build(folder: Path) -> Path:
    """Compile paged.c into `folder`; with OpenMP if the compiler has it."""
    compiler = os.environ.get("CC") or "cc"
    if shutil.which(compiler) is None:
        raise KernelUnavailable(f"there is no C compiler {compiler!r} on PATH")
    built = folder / "paged.so"
    errors = ""
    for parallel in (("-fopenmp",), ()):
        command = [compiler, *_FLAGS, *parallel, "-o", str(built), str(_SOURCES[0]), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_SECONDS)
        except subprocess.CalledProcessError as error:
            errors = errors or error.stderr.decode(errors="replace").strip()
        except subprocess.TimeoutExpired:
            raise KernelUnavailable(f"{compiler} took over {_BUILD_SECONDS} s") from None
        else:
            return built
    raise KernelUnavailable(f"{compiler} failed: {errors[-500:]}")


def _fingerprint() -> str:
    """Names a build: source, flags, compiler's name, and CPU, since -march=native depends on it."""
    parts: Sequence[bytes] = [
        *(source.read_bytes() for source in _SOURCES),
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
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "chairlift" / "kernels"
