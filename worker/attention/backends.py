"""Attention backends, and the choice of one for a model.

`reference` runs everywhere and is the oracle; `cpu` is the C kernel, `triton` the one for CUDA.
"auto" chooses the device's own kernel if it is available, else the reference.
"""

from __future__ import annotations

import logging
from typing import Final

import torch

from worker.attention.cpu import SUPPORTED_DTYPES, CpuBackend
from worker.attention.interface import AttentionBackend
from worker.attention.reference import ReferenceBackend
from worker.kernels.build import KernelUnavailable, kernel_library

_CHOICES: Final = ("auto", "reference", "cpu", "triton")
_KERNELS: Final = {"cpu": "cpu", "cuda": "triton"}  # by type of device
_MOST_HEAD_DIM: Final = 256  # of triton: larger tiles do not fit into shared memory

logger = logging.getLogger(__name__)


def choose_backend(
    wanted: str, device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool
) -> AttentionBackend:
    """The backend for `wanted`: auto, reference, cpu or triton ("" = auto).

    A kernel that cannot be built is replaced by the reference, with one warning. Raises ValueError
    for an impossible combination, including `deterministic` without the C kernel.
    """
    wanted = wanted or "auto"
    if wanted not in _CHOICES:
        raise ValueError(f"attention is {wanted!r}; allowed are {', '.join(_CHOICES)}")
    if deterministic:
        _check_deterministic(wanted, device, dtype)
    kernel = _KERNELS.get(device.type, "reference") if wanted == "auto" else wanted
    if kernel == "reference":
        return ReferenceBackend()
    obstacle = _obstacle(kernel, device, dtype, head_dim)
    if obstacle is None:
        try:
            return CpuBackend(kernel_library()) if kernel == "cpu" else _triton_backend(device)
        except KernelUnavailable as error:
            obstacle = str(error)
            if deterministic:
                raise ValueError(
                    f"deterministic needs the C attention kernel, but {obstacle}"
                ) from error
    elif wanted != "auto":
        raise ValueError(f"attention is {wanted!r}, but {obstacle}")
    logger.warning("attention falls back to reference, which is slower: %s", obstacle)
    return ReferenceBackend()


def _obstacle(kernel: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why `kernel` cannot serve this model here; None if it can."""
    name, place = {"cpu": ("C", "the CPU"), "triton": ("Triton", "CUDA")}[kernel]
    if _KERNELS.get(device.type) != kernel:
        return f"the {name} kernel runs on {place}, not on {device}"
    if dtype not in SUPPORTED_DTYPES:  # the same ones for both
        return f"the {name} kernel does not support {dtype}"
    if kernel == "triton" and head_dim > _MOST_HEAD_DIM:
        return f"the {name} kernel supports heads of at most {_MOST_HEAD_DIM}, not of {head_dim}"
    return None


def _triton_backend(device: torch.device) -> AttentionBackend:
    try:
        from worker.attention.cuda import TritonBackend  # triton comes with torch for CUDA only
    except ImportError as error:
        raise KernelUnavailable(f"triton cannot be imported: {error}") from error
    return TritonBackend(device)


def _check_deterministic(wanted: str, device: torch.device, dtype: torch.dtype) -> None:
    if device.type != "cpu" or dtype != torch.float32:
        raise ValueError(
            f"deterministic needs float32 on the CPU; this is {dtype} on {device}, where a row's "
            f"bits depend on the rest of the batch"
        )
    if wanted == "reference":
        raise ValueError(
            "deterministic needs the C attention kernel; attention is 'reference', whose bits "
            "depend on the shape of the batch"
        )
