"""Guards of the C kernels: each against what it stands in for, in turns in one run.

In the shapes of SmolLM2-135M, over memory that no cache holds. `make test` runs all once and
compares what they give; `make guards` measures. Least ratios: see test_core_guards.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.bench.attention_speed import one_step, step_context
from tests.bench.conftest import Guard
from tests.support.promised_geometry import promised_geometry
from tests.support.runners import unfuse_model
from worker.attention.cpu import CpuBackend
from worker.attention.interface import ATTENTION_NAME, AttentionCall, answering, register
from worker.attention.reference import ReferenceBackend
from worker.cpu_layers.fusing import fuse_model
from worker.cpu_layers.packed_linear import PackedLinear
from worker.cpu_layers.packing import pack_model
from worker.kernels.build import kernel_library

WIDTH, INTERMEDIATE, NUM_LAYERS = 576, 1536, 6
NUM_COPIES = 12  # of a layer's weights, which together exceed the caches


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_attention(guard: Guard) -> None:
    """A decode step of 16 requests with 512 tokens each, against gather + SDPA."""
    kernel, reference = CpuBackend(kernel_library()), ReferenceBackend()
    context = step_context([(1, 512)] * 16, NUM_LAYERS)
    guard(one_step(context, kernel), one_step(context, reference), at_least=2)


def test_attention_to_halves(guard: Guard) -> None:
    """A decode step over keys and values of float16, against one over float32: they are to be
    read as they lie; converting them first costs what reading less gains. Both pools are random, so
    only the times are compared (attention's own tests compare what it gives)."""
    kernel, shapes = CpuBackend(kernel_library()), [(1, 160)] * 64
    wide, narrow = (
        one_step(step_context(shapes, NUM_LAYERS, dtype), kernel)
        for dtype in (torch.float32, torch.float16)
    )
    guard(narrow, wide, at_least=1.2)  # 1.5 to 1.9 measured


@pytest.mark.parametrize("num_rows", [1, 16])
def test_packed_linear(num_rows: int, guard: Guard) -> None:
    """Weights packed once, against F.linear, which packs them at every call."""
    weights = [torch.randn(2 * INTERMEDIATE, WIDTH) for _ in range(NUM_COPIES)]
    packed = [PackedLinear([weight], [None], "float32") for weight in weights]
    x = torch.randn(num_rows, WIDTH)
    torch.testing.assert_close(packed[0](x), F.linear(x, weights[0]), atol=1e-4, rtol=1e-4)
    guard(
        lambda: [linear(x) for linear in packed],
        lambda: [F.linear(x, weight) for weight in weights],
        at_least={1: 0.7, 16: 1.3}[num_rows],
    )


class NoAttention:
    """Answers a layer with its own values: what remains is the rest of the layer."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        grouped = query.shape[1] // value.shape[1]
        return value.repeat_interleave(grouped, dim=1).transpose(1, 2).contiguous()


def packed_model() -> LlamaForCausalLM:
    """SmolLM2's layers, with random weights and a small vocabulary."""
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=WIDTH,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        attn_implementation=ATTENTION_NAME,
    )
    model = LlamaForCausalLM(config).eval()
    pack_model(model, "float32", lambda share: None)
    return model


@pytest.mark.parametrize("num_rows", [1, 16])
def test_fused_layer(num_rows: int, guard: Guard) -> None:
    """Layers in two calls to C, against the model's own forward over the same packed weights."""
    own, fused = packed_model(), packed_model()
    geometry = promised_geometry(fused.config, 16, 4)
    assert fuse_model(fused, geometry, 1000) == NUM_LAYERS
    tokens = torch.arange(num_rows)[None]

    def forward(model: LlamaForCausalLM) -> torch.Tensor:
        with torch.inference_mode(), answering(NoAttention()):
            hidden = model.model(input_ids=tokens, position_ids=tokens, use_cache=False)
        return hidden.last_hidden_state

    torch.testing.assert_close(forward(fused), forward(own), atol=1e-4, rtol=1e-3)
    guard(
        lambda: forward(fused), lambda: forward(own), at_least=0.9
    )  # 1.02 when busy, 1.9 when quiet
    unfuse_model(fused)
    torch.testing.assert_close(forward(fused), forward(own))
