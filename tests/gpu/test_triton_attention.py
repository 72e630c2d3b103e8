"""The Triton kernels on a card: against float64, and replayed from a graph."""

from __future__ import annotations

import pytest
import torch

from tests.support.attention_cases import CALLS, TOLERANCE, Case, attend, by_hand, make_case
from worker.attention.backends import choose_backend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CUDA = torch.device("cuda", 0)
# decodes of one to three pieces, short requests, chunks, a whole prompt, and requests of no token
SHAPES = [(1, 1), (0, 0), (1, 1100), (3, 700), (200, 333), (90, 90), (1, 512), (0, 12)]


@pytest.fixture(scope="module")
def backend():
    chosen = choose_backend("auto", CUDA, torch.bfloat16, head_dim=128, deterministic=False)
    assert chosen.name == "triton"
    return chosen


def error(backend, case: Case) -> float:
    return (attend(backend, case.to(CUDA)).cpu() - by_hand(case)).abs().max().item()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_agrees_with_float64_arithmetic(backend, dtype, call):
    """What the interpreter cannot show: tensor cores, bfloat16, and programs that really run side
    by side. float32 would miss its tolerance a hundredfold with TF32."""
    assert error(backend, make_case(SHAPES, 4, 128, dtype, 16, **call)) < 3 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [12, 64, 80, 256])
@pytest.mark.parametrize("grouped", [1, 3, 8, 20])
def test_head_sizes_and_groups(backend, grouped, head_dim, dtype):
    """Every shape of tile, the padded ones too."""
    case = make_case(SHAPES, grouped, head_dim, dtype, 32, **CALLS["all"])
    assert error(backend, case) < 3 * TOLERANCE[dtype]


def test_a_decode_has_the_same_bits_with_and_without_a_chunk_beside_it(backend):
    """A prompt that arrives must not change the answers of those that decode."""
    case = make_case([(1, 1100), (70, 90)], 4, 128, torch.bfloat16, 16, **CALLS["sinks"]).to(CUDA)
    together = attend(backend, case)
    assert torch.equal(attend(backend, case.alone(0)), together[:1])


def test_a_graph_replays_other_lengths(backend):
    """One graph serves steps of any lengths: nothing of the captured step may be baked in."""
    case = make_case([(1, 700), (1, 30), (1, 1)], 4, 128, torch.bfloat16, 16).to(CUDA)
    eager = attend(backend, case)  # and compiled
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(backend, case)
    graph.replay()
    assert torch.equal(out, eager)
    tables, length = case.context.groups[0], 500  # one piece instead of two
    case.context.seq_lens[0] = length
    tables.slot_mapping[0] = tables.blocks[(length - 1) // 16] * 16 + (length - 1) % 16
    graph.replay()
    assert torch.equal(out, attend(backend, case))
    assert not torch.equal(out[0], eager[0])
    assert torch.equal(out[1:], eager[1:])
