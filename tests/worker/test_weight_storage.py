"""Weights that come back exactly, from the narrowest storage that holds them."""

from __future__ import annotations

import pytest
import torch

from worker.cpu_layers.packed_linear import PackedLinear
from worker.cpu_layers.weight_storage import exactly

WIDE, OUT = 96, 40


def in_blocks(least: int, most: int, has_offset: bool) -> torch.Tensor:
    """What GGUF's Q4_1 and Q8_0 dequantise to: float32 [OUT, WIDE]."""
    generator = torch.Generator().manual_seed(5)
    shape = (OUT, WIDE // 32)
    step = (torch.rand(shape, generator=generator) * 0.02).half().float()[..., None]
    offset = torch.zeros(*shape, 1)
    if has_offset:
        offset = torch.randn(shape, generator=generator).half().float()[..., None]
    codes = torch.randint(least, most + 1, (*shape, 32), generator=generator)
    codes[..., 0], codes[..., 7] = least, most
    return (step * codes + offset).view(OUT, WIDE)


def of_kind(kind: str) -> torch.Tensor:
    normal = torch.randn(OUT, WIDE, generator=torch.Generator().manual_seed(5))
    return {
        "blocks4": lambda: in_blocks(0, 15, True),
        "blocks8": lambda: in_blocks(-127, 127, False),
        "bfloat16": lambda: normal.bfloat16().float(),
        "float16": lambda: normal.half().float(),
        "float32": lambda: normal,
    }[kind]()


BITS = {"blocks4": 5, "blocks8": 8.5, "bfloat16": 16, "float16": 16, "float32": 32}


@pytest.mark.parametrize("kind", BITS)
def test_the_narrowest_storage_is_found(kind):
    """A checkpoint that is read as more than it holds is served at a fraction of the speed."""
    storage, stored = exactly(of_kind(kind))
    assert storage == kind
    assert stored.nbytes * 8 / (48 * WIDE) == BITS[kind]  # 40 outputs take three panels


@pytest.mark.parametrize("kind", BITS)
def test_every_weight_comes_back_bit_for_bit(kind):
    """A row of the identity as input reads a column of weights: what `float32` promises."""
    weight = of_kind(kind)
    layer = PackedLinear([weight], [None])
    assert layer.storage == kind
    eye = torch.eye(WIDE)
    for rows in (1, 5, WIDE):
        assert torch.equal(layer(eye[:rows]), weight.T[:rows])


@pytest.mark.parametrize("kind", ["blocks4", "blocks8", "bfloat16", "float16"])
def test_a_result_has_the_bits_that_float32_storage_gives(kind):
    """Storage is no arithmetic: it may not change an answer."""
    weight = of_kind(kind)
    x = torch.randn(33, WIDE, generator=torch.Generator().manual_seed(6))
    odd = torch.cat([weight, torch.full((1, WIDE), 0.1)])  # no 16-bit format has 0.1
    layer, plain = PackedLinear([weight], [None]), PackedLinear([odd], [None])
    assert plain.storage == "float32"
    for rows in (1, 4, 33):
        assert torch.equal(layer(x[:rows]), plain(x[:rows])[:, :OUT])


@pytest.mark.parametrize("kind", ["blocks4", "blocks8", "bfloat16"])
def test_one_weight_that_does_not_fit_takes_the_storage_away(kind):
    """Exactly means all of them: the last weight of the last output too."""
    weight = of_kind(kind)
    weight[-1, -1] = 0.1
    assert exactly(weight)[0] == "float32"


def test_constant_blocks_and_zeros():
    """A block without a spread has a step of zero; dividing by it must not spoil the others."""
    weight = in_blocks(0, 15, True)
    weight[3] = 0.0
    weight[4, :32] = 0.25
    layer = PackedLinear([weight], [None])
    assert layer.storage == "blocks4"
    assert torch.equal(layer(torch.eye(WIDE)), weight.T)


def test_inputs_that_are_no_whole_blocks_are_stored_otherwise():
    """Blocks are cut along the input; half of one has no place."""
    assert exactly(torch.zeros(16, 33))[0] == "bfloat16"


def test_what_is_not_finite_is_kept():
    """The worker finds such requests by their results; a storage may not hide them."""
    weight = of_kind("blocks4")
    weight[2, 5] = float("inf")
    layer = PackedLinear([weight], [None])
    assert torch.isinf(layer(torch.ones(1, WIDE))[0, 2])


@pytest.mark.parametrize(("kind", "bound"), [("blocks4", 1e-2), ("blocks8", 1e-4)])
def test_int8_keeps_the_weights_of_blocks(kind, bound):
    """Rounded again, a 4-bit model would pay twice. What is left is the rounding of activations, to
    8 and to 16 bits; ones are exact in both."""
    weight = of_kind(kind)
    layer = PackedLinear([weight], [None], "int8")
    assert layer.storage == kind
    assert layer.packed.nbytes * 8 / (48 * WIDE) == BITS[kind]
    torch.testing.assert_close(layer(torch.ones(7, WIDE))[3], weight.sum(dim=1))
    x = torch.randn(7, WIDE, generator=torch.Generator().manual_seed(6))
    right = x @ weight.T
    assert (layer(x) - right).abs().max() < bound * right.abs().max()


@pytest.mark.parametrize("size", [1e-9, 1e-5, 1.0, 1e5])
def test_int8_rounds_by_half_a_step_at_most(size):
    """Steps are float16, which is coarse where weights are tiny: they may not be cut off there."""
    weight = of_kind("float32") * size
    layer = PackedLinear([weight], [None], "int8")
    largest = weight.unflatten(1, (-1, 32)).abs().amax(dim=2, keepdim=True).expand(-1, -1, 32)
    error = (layer(torch.eye(WIDE)).T - weight).abs()
    assert (error <= 0.51 * (largest.reshape(OUT, WIDE) / 127 + 2**-24)).all()


@pytest.mark.parametrize("kind", ["blocks4", "blocks8"])
def test_one_row_and_many_have_the_same_bits_in_int8(kind):
    """Few rows are multiplied with what is stored, many with what is unpacked before."""
    layer = PackedLinear([of_kind(kind)], [None], "int8")
    x = torch.randn(300, WIDE, generator=torch.Generator().manual_seed(6))
    right = torch.cat([layer(row) for row in x.split(1)])
    for rows in (2, 6, 7, 13, 300):
        assert torch.equal(layer(x[:rows]), right[:rows])
