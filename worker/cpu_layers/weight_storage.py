"""How the weights of a packed layer are stored: panel by panel, in the order in which C reads them.

Owns: the layouts of kernels/linear.h, finding the narrowest one that preserves every weight of a
layer exactly, rounding to float16 and int8. Does not own: what a layer does with its weights
(packed_linear.py).

Weights from a checkpoint narrower than float32 contain no more information than that: those from
bfloat16 have 16 zero bits, those from GGUF files consist of a step and an offset for 32 weights and
four or eight bits for each. Stored that way, the kernel restores the exact float32 weights, and
reads only a half to a sixth of the memory for every token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F

PANEL: Final = 16  # output features stored together; PANEL of linear.h
BLOCK: Final = 32  # input features that share a step and an offset; BLOCK of linear.h
# Output features encoded at once, a multiple of PANEL: few, so that an unfit storage is abandoned
# early, but enough that call overhead does not matter.
_AT_ONCE: Final = 512
_LARGEST_INT8: Final = 127 * torch.finfo(torch.half).max

# enum of linear.h
STORAGES: Final = ("float32", "float16", "bfloat16", "blocks4", "blocks8")

Encode = Callable[[torch.Tensor], torch.Tensor | None]


def exactly(weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    """The narrowest storage that holds float32 [out, in] exactly, and its bytes, uint8."""
    for storage, encode in _EXACT.items():
        stored = _encoded(weight, encode)
        if stored is not None:
            return storage, stored
    raise AssertionError("float32 holds every float32")


def as_float16(weight: torch.Tensor) -> torch.Tensor:
    """float32 [out, in], rounded to float16: its bytes, uint8."""
    halved = weight.half()
    if not torch.isfinite(halved).all():
        raise ValueError(
            f"a weight is {weight.abs().max():g}; float16 reaches {torch.finfo(torch.half).max:g}"
        )
    stored = _encoded(halved, _plain)
    assert stored is not None
    return stored


def as_int8(weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Blocks for float32 [out, in], of 4 bits if that is exact, else rounded to 8: the storage and
    its bytes, uint8."""
    largest = weight.abs().max()
    if not largest <= _LARGEST_INT8:
        raise ValueError(f"a weight is {largest:g}; int8 reaches {_LARGEST_INT8:g}")
    stored = _encoded(weight, _as_blocks4)
    if stored is not None:
        return "blocks4", stored
    stored = _encoded(weight, _rounded_to_blocks8)
    assert stored is not None
    return "blocks8", stored


def _encoded(weight: torch.Tensor, encode: Encode) -> torch.Tensor | None:
    """[panels][...]; None if the storage cannot represent a weight. In parts, so that a large
    lm_head needs no second copy while it is packed."""
    parts = []
    for first in range(0, len(weight), _AT_ONCE):
        part = weight[first : first + _AT_ONCE]
        part = F.pad(part, (0, 0, 0, -len(part) % PANEL))
        encoded = encode(part.view(-1, PANEL, part.shape[1]))
        if encoded is None:
            return None
        parts.append(encoded.reshape(-1).view(torch.uint8))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# ---- encodings: [panels, PANEL, features] -> their bytes, or None ------------------


def _plain(part: torch.Tensor) -> torch.Tensor:
    return part.transpose(1, 2).contiguous()


def _as_bfloat16(part: torch.Tensor) -> torch.Tensor | None:
    halved = part.bfloat16()
    return _plain(halved) if torch.equal(halved.float(), part) else None


def _as_float16(part: torch.Tensor) -> torch.Tensor | None:
    halved = part.half()
    return _plain(halved) if torch.equal(halved.float(), part) else None


def _as_blocks4(part: torch.Tensor) -> torch.Tensor | None:
    """Blocks of GGUF's Q4_1: the smallest weight has code 0, the largest 15."""
    if part.shape[2] % BLOCK:
        return None
    blocks = part.unflatten(2, (-1, BLOCK))
    low, high = blocks.aminmax(dim=3)
    step, offset = ((high - low) / 15).half(), low.half()
    codes = _codes(blocks, step, offset, 0, 15)
    if not _is_exact(blocks, step, offset, codes):
        return None
    first, second = _quads(codes.to(torch.uint8)).unbind(2)
    return torch.cat([_bytes(step), _bytes(offset), (first | second << 4).flatten(2)], dim=2)


def _as_blocks8(part: torch.Tensor) -> torch.Tensor | None:
    """Blocks of GGUF's Q8_0: the largest weight has code 127 or -127; no offset."""
    if part.shape[2] % BLOCK:
        return None
    blocks = part.unflatten(2, (-1, BLOCK))
    step, codes = _rounded(blocks)
    return _blocks8(step, codes) if _is_exact(blocks, step, None, codes) else None


def _rounded_to_blocks8(part: torch.Tensor) -> torch.Tensor:
    """Rounds any weights; the last block is filled up with zeros."""
    return _blocks8(*_rounded(F.pad(part, (0, -part.shape[2] % BLOCK)).unflatten(2, (-1, BLOCK))))


def _rounded(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The step, float16, and the codes; every weight is at most half a step from its code."""
    largest = blocks.abs().amax(dim=3)
    step = (largest / 127).half()
    # below its normal range float16 is so coarse that rounding down would clip the largest weight
    too_small = step.float() * 127.5 < largest
    step = torch.where(too_small, (step.view(torch.int16) + 1).view(torch.half), step)
    return step, _codes(blocks, step, None, -127, 127)


def _blocks8(step: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    by_half = _quads(codes.to(torch.int8)).flatten(2)
    return torch.cat([_bytes(step), by_half.view(torch.uint8)], dim=2)


# Below, blocks are float32 [panels, PANEL, blocks, BLOCK]; step and offset are float16 [panels,
# PANEL, blocks].


def _codes(
    blocks: torch.Tensor, step: torch.Tensor, offset: torch.Tensor | None, least: int, most: int
) -> torch.Tensor:
    """The nearest code of each weight."""
    above = blocks if offset is None else blocks - offset.float()[..., None]
    return (above / step.float()[..., None]).round_().nan_to_num_(0.0).clamp_(least, most)


def _is_exact(
    blocks: torch.Tensor, step: torch.Tensor, offset: torch.Tensor | None, codes: torch.Tensor
) -> bool:
    """Whether the codes restore the weights. A step times a code is exact in float32, so this
    rounds once, as the kernel does."""
    found = codes * step.float()[..., None]
    return torch.equal(found if offset is None else found + offset.float()[..., None], blocks)


def _quads(codes: torch.Tensor) -> torch.Tensor:
    """Bytes -> [panels, blocks, 2, BLOCK / 4, PANEL / 2, 4]: both halves of a panel; four input
    features are adjacent, as integer products need them."""
    return codes.unflatten(3, (4, -1)).unflatten(1, (2, -1)).permute(0, 3, 1, 5, 2, 4)


def _bytes(halves: torch.Tensor) -> torch.Tensor:
    """float16 [panels, PANEL, blocks] -> uint8 [panels, blocks, 2 PANEL]"""
    return halves.transpose(1, 2).contiguous().view(torch.uint8)


_EXACT: Final[dict[str, Encode]] = {  # the narrowest first
    "blocks4": _as_blocks4,
    "blocks8": _as_blocks8,
    "bfloat16": _as_bfloat16,
    "float16": _as_float16,
    "float32": _plain,
}
