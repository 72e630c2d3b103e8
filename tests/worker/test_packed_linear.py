"""Packed linear layers against float64, and the bits of their rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from worker.cpu_layers.packed_linear import WEIGHT_FORMATS, PackedLinear

# The largest error over the largest result, of normal weights; measured, times two to four.
BOUNDS = {"float32": 4e-6, "float16": 6e-4, "int8": 1.5e-2}
SHAPES = [  # in, out: whole panels and slices, and neither
    (576, 1536),
    (1536, 576),
    (7, 33),
    (1, 1),
    (1025, 5),
    (2049, 100),
    (530, 16),
    (20, 8200),
]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def error(result: torch.Tensor, right: torch.Tensor) -> float:
    return float((result - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize(("wide", "out"), SHAPES, ids=str)
def test_agrees_with_float64(wide, out, weight_format):
    """A panel, slice or tile that is cut wrongly, for any number of rows."""
    weight, bias, x = tensors((out, wide), (out,), (100, wide))
    right = x.double() @ weight.double().T
    for layer, expected in (
        (PackedLinear([weight], [bias], weight_format), right + bias.double()),
        (PackedLinear([weight], [None], weight_format), right),
    ):
        for rows in (1, 5, 7, 100):
            result = layer(x[:rows])
            assert result.dtype == torch.float32
            assert error(result, expected[:rows]) < BOUNDS[weight_format]


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize(("wide", "out"), [(576, 200), (1537, 33)], ids=str)
def test_the_bits_of_a_row_depend_on_nothing_else(wide, out, weight_format):
    """What `deterministic` promises: not on the other rows, and not on the number of threads."""
    weight, bias, x = tensors((out, wide), (out,), (512, wide))
    layer = PackedLinear([weight], [bias], weight_format)
    right = torch.cat([layer(row) for row in x.split(1)])
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for rows in (*range(1, 41), 64, 200, 512):
            assert torch.equal(layer(x[:rows]), right[:rows])
            assert torch.equal(layer(x[-rows:]), right[-rows:])


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_layers_joined_give_what_each_gives(weight_format):
    """Fused q, k and v must not change a bit, so that fusing is free to choose."""
    x, *parts = tensors((9, 96), (48, 96), (20, 96), (20, 96), (48,), (20,))
    weights, biases = parts[:3], [parts[3], None, parts[4]]
    joined = PackedLinear(weights, biases, weight_format)(x)
    apart = [
        PackedLinear([weight], [bias], weight_format)(x)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    assert torch.equal(joined, torch.cat(apart, dim=1))


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_strides_and_shapes(weight_format):
    """Callers hand over slices and batches; a copy too few reads another's numbers."""
    weight, x = tensors((40, 64), (3, 10, 200))
    layer = PackedLinear([weight], [None], weight_format)
    right = layer(x[..., 8:72].contiguous().view(-1, 64)).view(3, 10, 40)
    assert torch.equal(layer(x[..., 8:72]), right)
    assert torch.equal(layer(x[1, :, 8:72]), right[1])
    assert torch.equal(layer(x.transpose(1, 2).contiguous().transpose(1, 2)[..., 8:72]), right)
    assert torch.equal(layer(x[2, 4, 8:72]), right[2, 4])
    assert layer(x[:0, :, 8:72]).shape == (0, 10, 40)


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("out", [40, 48])
def test_computing_in_place(out, weight_format):
    """What fused code calls: strides of its own, adding to what is there, and no number beyond the
    layer's columns touched."""
    weight, bias, x, before = tensors((out, 600), (out,), (13, 600), (13, 64))
    layer = PackedLinear([weight], [bias], weight_format)
    result, added = before.clone(), before.clone()
    layer.compute(x.data_ptr(), 600, 13, result.data_ptr(), 64)
    layer.compute(x.data_ptr(), 600, 13, added.data_ptr(), 64, accumulate=True)
    assert torch.equal(result[:, :out], layer(x))
    assert error(added[:, :out], (layer(x) + before[:, :out]).double()) < 1e-6
    assert torch.equal(result[:, out:], before[:, out:])
    assert torch.equal(added[:, out:], before[:, out:])


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_shows_and_spoils_no_other(weight_format, bad):
    """The worker fails such requests by their results; hidden, they would answer garbage."""
    weight, x = tensors((40, 100), (8, 100))
    layer = PackedLinear([weight], [None], weight_format)
    right = layer(x)
    for place in (5, 98):
        spoilt = x.clone()
        spoilt[3, place] = bad
        result = layer(spoilt)
        assert not torch.isfinite(result[3]).any()
        assert torch.equal(result[:3], right[:3])
        assert torch.equal(result[4:], right[4:])


def test_rows_of_zeros_and_of_extreme_sizes():
    """int8 divides by a row's largest value."""
    weight, x = tensors((32, 64), (5, 64))
    layer = PackedLinear([weight], [None], "int8")
    x *= torch.tensor([0.0, 1e-30, 1.0, 1e30, 1e-38])[:, None]
    result = layer(x)
    assert not result[[0, 4]].any()
    for row in (1, 2, 3):
        assert error(result[row], x[row].double() @ weight.double().T) < BOUNDS["int8"]


@pytest.mark.parametrize(
    ("weight_format", "value", "message"),
    [("float16", 1e5, "a weight is 100000; float16 reaches 65504"), ("int8", float("inf"), "int8")],
)
def test_weights_that_a_format_cannot_hold_are_refused(weight_format, value, message):
    """Rounded to infinity, they would make every answer garbage."""
    weight = torch.full((16, 16), value)
    with pytest.raises(ValueError, match=message):
        PackedLinear([weight], [None], weight_format)


@pytest.mark.parametrize(
    "x", [torch.ones(2, 16).double(), torch.ones(2, 15)], ids=["dtype", "width"]
)
def test_an_input_of_another_kind_is_refused(x):
    """C reads what lies at the address, whatever it is."""
    with pytest.raises(TypeError, match=r"needs float32 \[\.\.\., 16\]"):
        PackedLinear([torch.ones(4, 16)], [None])(x)
