"""Which models can be captured as CUDA graphs, found out without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support import tiny_models
from tests.support.loading import load
from worker.model.capture_check import why_not_capturable

# grouped expert products are there for bfloat16 only, and tiny models are float32
NEED_BFLOAT16 = {"gpt_oss", "phimoe"}


@pytest.mark.parametrize("name", list(tiny_models.SERVED))
def test_families_can_be_captured(saved, name):
    """A family that silently runs eager is several times slower on a GPU."""
    dtype = "bfloat16" if name in NEED_BFLOAT16 else "float32"
    loaded = load(saved(tiny_models.SERVED[name])[0], dtype=dtype, weight_format="unpacked")
    assert why_not_capturable(loaded.model) is None
    # and the look leaves nothing fake behind
    assert all(type(buffer) is torch.Tensor for buffer in loaded.model.buffers())


@pytest.mark.parametrize(
    ("asks", "operation"),
    [
        (lambda hidden: hidden.sum().item(), "_local_scalar_dense"),
        (lambda hidden: bool(hidden.any()), "_local_scalar_dense"),
        (lambda hidden: hidden.nonzero(), "nonzero"),
    ],
)
def test_asking_the_device_is_named(saved, asks, operation):
    """Captured all the same, such a forward would crash, or replay one step's value for ever."""
    loaded = load(saved(tiny_models.llama)[0], weight_format="unpacked")

    def hook(_module, _inputs, output):
        asks(output)

    handle = loaded.model.model.layers[1].mlp.register_forward_hook(hook)
    reason = why_not_capturable(loaded.model)
    handle.remove()
    assert reason is not None
    assert operation in reason
    assert why_not_capturable(loaded.model) is None
