"""The C kernels as any CPU can run them, beside those built for this one.

Most intrinsics have a plain twin, chosen by the compiler's flags: on the CPUs that the other tests
run on, nobody would ever compile it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from tests.support.attention_cases import CALLS, TOLERANCE, attend, make_case
from tests.support.in_process import Answer, InProcess
from tests.support.tiny_models import gemma2, llama
from tests.worker.test_weight_storage import OUT, WIDE, of_kind
from worker.attention.cpu import CpuBackend
from worker.attention.reference import ReferenceBackend
from worker.cpu_layers import packed_linear
from worker.cpu_layers.packed_linear import PackedLinear
from worker.kernels import build
from worker.kernels.build import kernel_library

# Of the largest value: products and sums are rounded apart or together; over layers that grows,
# and one quantised activation may fall on the other side of half a step.
ROUNDING = 1e-6
ROUNDING_LAYERS = {"float32": 2e-5, "int8": 5e-3}

# whole numbers that this storage holds, and no narrower one
LIMITS = {
    "float32": (-4097, 4097),
    "blocks4": (0, 15),
    "blocks8": (-127, 127),
    "bfloat16": (-255, 255),
    "float16": (-1023, 1023),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels for the oldest CPU of this kind."""
    kept = [flag for flag in build._FLAGS if flag not in ("-march=native", "-O3")]
    assert len(kept) == len(build._FLAGS) - 2
    with patch.object(build, "_FLAGS", ("-O1", *kept)):  # a sixth of the compiler's time
        return kernel_library(tmp_path_factory.mktemp("kernels"))


@contextmanager
def in_place(library: ctypes.CDLL) -> Iterator[None]:
    """What is made meanwhile computes with `library`, for ever."""
    packed_linear._functions.cache_clear()
    with patch.dict(build._loaded, {build._default_cache_folder(): library}):
        yield
    packed_linear._functions.cache_clear()


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("kind", LIMITS)
def test_whole_numbers_come_out_exactly(plain: ctypes.CDLL, kind: str) -> None:
    """Their sums are exact in any order: a code that is widened wrongly cannot hide as rounding."""
    least, most = LIMITS[kind]
    weight = torch.randint(max(least, -200), min(most, 200) + 1, (OUT, WIDE)).float()
    weight.view(OUT, -1, 32)[..., :2] = torch.tensor([least, most])
    x = torch.randint(-50, 51, (37, WIDE)).float()
    right = (x.double() @ weight.double().T).float()
    with in_place(plain):
        layer = PackedLinear([weight], [None])
    assert layer.storage == kind
    for rows in (1, 4, 37):
        assert torch.equal(layer(x[:rows]), right[:rows])


@pytest.mark.parametrize(
    ("kind", "weight_format", "storage"),
    [
        *((kind, "float32", kind) for kind in LIMITS),
        ("blocks4", "int8", "blocks4"),
        ("float32", "int8", "blocks8"),
    ],
)
def test_linear_layers_agree(
    plain: ctypes.CDLL, kind: str, weight_format: str, storage: str
) -> None:
    """Bits of a row may differ between CPUs, answers may not."""
    weight = of_kind(kind)
    x, bias = torch.randn(37, WIDE), torch.randn(OUT)
    native = PackedLinear([weight], [bias], weight_format)
    with in_place(plain):
        other = PackedLinear([weight], [bias], weight_format)
    assert other.storage == native.storage == storage
    for rows in (1, 4, 37):
        assert error(other(x[:rows]), native(x[:rows])) < ROUNDING


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "head_dim"),
    [
        (torch.float32, torch.float32, 20),
        (torch.float16, torch.float16, 20),
        (torch.bfloat16, torch.bfloat16, 20),
        (torch.float32, torch.float16, 32),
    ],
    ids=str,
)
def test_attention_agrees(
    plain: ctypes.CDLL,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    call: dict[str, object],
) -> None:
    """Decodes, a whole prompt and chunks; heads that end in the middle of a vector."""
    shapes = [(1, 1), (1, 130), (5, 5), (40, 70)]
    case = make_case(shapes, 3, head_dim, dtype, 16, kv_dtype=kv_dtype, **call)
    native, other = (CpuBackend(library) for library in (kernel_library(), plain))
    difference = attend(other, case).double() - attend(native, case).double()
    assert difference.abs().max() < 2 * TOLERANCE[dtype]


def test_stored_halves_have_the_same_bits(plain: ctypes.CDLL) -> None:
    """A pool's float16, from instructions, plain C, and torch: ties to even, subnormals, overflow
    to infinity, NaN that stays NaN. Heads of 20 numbers are two vectors and four by themselves."""
    generator = torch.Generator().manual_seed(7)
    case = make_case([(200, 200)], 1, 20, torch.float32, 16, kv_dtype=torch.float16)

    def floats() -> torch.Tensor:
        """Half of them near the ends of float16's exponents, or halfway between two halves."""
        anything = torch.randint(-(2**31), 2**31, case.key.shape, generator=generator)
        exponent = torch.randint(100, 146, case.key.shape, generator=generator) << 23
        few_bits = (anything & 0x7FFFFF) >> 11 << 11
        signs = anything & -(2**31)
        near = signs | exponent | few_bits
        return torch.where(anything % 2 == 0, anything, near).int().view(torch.float32)

    case = replace(case, key=floats(), value=floats())
    stored = []
    for library in (kernel_library(), plain):
        case.pages.zero_()
        attend(CpuBackend(library), case)
        stored.append(case.pages.clone())
    assert torch.equal(stored[0].view(torch.int16), stored[1].view(torch.int16))
    attend(ReferenceBackend(), case)
    assert torch.equal(stored[0].isnan(), case.pages.isnan())
    assert stored[0].isnan().any()
    assert stored[0].isinf().any()
    assert torch.equal(stored[0].nan_to_num(0), case.pages.nan_to_num(0))


@pytest.mark.parametrize("weight_format", ROUNDING_LAYERS)
@pytest.mark.parametrize("make", [llama, gemma2])  # SiLU; GELU, windows and capped scores
def test_decoder_layers_agree(
    plain: ctypes.CDLL,
    served: Callable[..., InProcess],
    prompts: list[list[int]],
    make: Callable[[], object],
    weight_format: str,
) -> None:
    """Norms, rotary embedding and activation of a whole model, prompts and decode steps."""

    def answers() -> list[Answer]:
        settings = {"num_threads": 2, "weight_format": weight_format, "max_batch_tokens": 40}
        return served(make, **settings).answers(prompts, [2] * len(prompts))

    native = answers()
    with in_place(plain):
        other = answers()
    for one, two in zip(native, other, strict=True):
        assert error(two.logits, one.logits) < ROUNDING_LAYERS[weight_format]
