"""Attention backends, and which one serves a model.

`reference` runs everywhere and is the oracle; `cpu` is the C kernel. Asked for "auto", a CPU gets
the C kernel if it can be had, and everything else the reference.
"""

from __future__ import annotations

import logging
from typing import Final

import torch

from worker.attention.cpu import SUPPORTED_DTYPES, CpuBackend
from worker.attention.interface import AttentionBackend
from worker.attention.reference import ReferenceBackend
from worker.kernels.build import KernelUnavailable, kernel_library

_CHOICES: Final = ("auto", "reference", "cpu")
_logger = logging.getLogger(__name__)


def choose_backend(
    wanted: str, device: torch.device, dtype: torch.dtype, deterministic: bool
) -> AttentionBackend:
    """The backend for `wanted`: auto, reference or cpu ("" = auto).

    Where the C kernel is due but cannot be built, the reference takes its place with one warning.
    Raises ValueError for what cannot be, `deterministic` without the kernel included.
    """
    wanted = wanted or "auto"
    if wanted not in _CHOICES:
        later = "; triton comes later" if wanted == "triton" else ""
        raise ValueError(f"attention is {wanted!r}; allowed are {', '.join(_CHOICES)}{later}")
    if deterministic:
        _check_deterministic(wanted, device, dtype)
    if wanted == "reference":
        return ReferenceBackend()
    obstacle = _obstacle(device, dtype)
    if obstacle is None:
        try:
            return CpuBackend(kernel_library())
        except KernelUnavailable as error:
            obstacle = str(error)
            if deterministic:
                raise ValueError(
                    f"deterministic needs the C attention kernel, but {obstacle}"
                ) from error
        _logger.warning("attention falls back to reference, which is slower: %s", obstacle)
    elif wanted == "cpu":
        raise ValueError(f"attention is 'cpu', but {obstacle}")
    return ReferenceBackend()


def _obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the C kernel cannot serve this, if it cannot."""
    if device.type != "cpu":
        return f"the C kernel runs on the CPU, not on {device}"
    if dtype not in SUPPORTED_DTYPES:
        return f"the C kernel has no {dtype}"
    return None


def _check_deterministic(wanted: str, device: torch.device, dtype: torch.dtype) -> None:
    if device.type != "cpu" or dtype != torch.float32:
        raise ValueError(
            f"deterministic needs float32 on the CPU; this is {dtype} on {device}, where the bits "
            f"of a row depend on what else is in the batch"
        )
    if wanted == "reference":
        raise ValueError(
            "deterministic needs the C attention kernel; attention is 'reference', whose bits "
            "depend on the shape of the batch"
        )
