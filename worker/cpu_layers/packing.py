"""Replaces the linear layers of a loaded model by packed ones.

Replaced are torch's nn.Linear and transformers' Conv1D, in float32 on the CPU; anything else
(experts in 3-D parameters, quantised layers, subclasses with a forward of their own, layers with
hooks or whose weight the model reads itself) stays as it is. An lm_head that shares its weights
with the embedding is packed like the others; the embedding keeps its table.

Owns: which layers are replaced, and the log of it. Does not own: the packed layer
(packed_linear.py), fusing layers (fusing.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from worker.cpu_layers.packed_linear import WEIGHT_FORMATS, PackedLinear
from worker.kernels.build import KernelUnavailable, kernel_library

UNPACKED = "unpacked"  # the plain twin: the model's own layers

logger = logging.getLogger(__name__)


def pack_model(
    model: PreTrainedModel,
    weight_format: str,
    progress: Callable[[float], None],
    kept: Collection[nn.Module] = (),
) -> None:
    """Replaces all layers but `kept` in place; calls `progress` with the share done.

    `weight_format` is float32 (or ""), float16, int8, or unpacked, which replaces nothing. A model
    that is not in float32 on the CPU stays as it is. Without a compiler float32 stays unpacked,
    with a warning. Raises ValueError for a format that does not exist or is not possible here.
    """
    weight_format = weight_format or "float32"
    if weight_format not in (*WEIGHT_FORMATS, UNPACKED):
        raise ValueError(
            f"weight_format is {weight_format!r}; allowed are {', '.join(WEIGHT_FORMATS)} and "
            f"{UNPACKED}"
        )
    if weight_format == UNPACKED:
        return
    obstacle = _obstacle(model)
    if obstacle is not None:
        if weight_format != "float32":
            raise ValueError(f"weight_format is {weight_format!r}, but {obstacle}")
        if (model.device.type, model.dtype) == ("cpu", torch.float32):
            logger.warning("linear layers stay unpacked, which is slower: %s", obstacle)
        return
    _replace(model, weight_format, progress, kept)


def is_packed(model: nn.Module) -> bool:
    """Whether every linear layer is packed."""
    return not any(isinstance(module, nn.Linear | Conv1D) for module in model.modules())


def _obstacle(model: PreTrainedModel) -> str | None:
    """Why this model's layers cannot be packed; None if they can."""
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return f"packed weights need float32 on the CPU, not {model.dtype} on {model.device}"
    try:
        kernel_library()
    except KernelUnavailable as error:
        return str(error)
    return None


def _replace(
    model: PreTrainedModel,
    weight_format: str,
    progress: Callable[[float], None],
    kept: Collection[nn.Module],
) -> None:
    before = _bytes(model)
    found = [
        (path, module)
        for path, module in model.named_modules(remove_duplicate=False)
        if _is_plain(module) and module not in kept
    ]
    done, total = 0, sum(module.weight.numel() for _, module in found)
    packed: dict[int, PackedLinear] = {}  # by id: a module may be in several places
    while found:
        path, module = found.pop(0)
        weight = module.weight.T if isinstance(module, Conv1D) else module.weight
        if id(module) not in packed:
            try:
                packed[id(module)] = PackedLinear([weight], [module.bias], weight_format)
            except ValueError as error:
                raise ValueError(
                    f"weight_format is {weight_format!r}, but in {path} {error}"
                ) from error
        model.set_submodule(path, packed[id(module)])
        done += weight.numel()
        del module, weight  # frees the original, unless an embedding shares it
        progress(done / total)
    storages = Counter(layer.storage for layer in packed.values())
    left = sum(isinstance(module, nn.Linear | Conv1D) for module in model.modules())
    logger.info(
        "packed %d linear layers as %s (%s): weights %.0f MiB before, %.0f MiB now%s",
        len(packed),
        weight_format,
        ", ".join(f"{count} stored as {storage}" for storage, count in storages.items()),
        before / 2**20,
        _bytes(model) / 2**20,
        f"; {left} others stay as they are" if left else "",
    )


def _is_plain(module: nn.Module) -> bool:
    """A layer whose forward is x W^T + b and nothing more."""
    return (
        type(module) in (nn.Linear, Conv1D)
        and module.weight.dtype == torch.float32
        and module.weight.device.type == "cpu"
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and "forward" not in vars(module)
    )


def _bytes(model: nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
