"""The Triton kernels in triton's interpreter, on the CPU, against float64 arithmetic.

test_triton.py runs this file in a process of its own, for triton reads TRITON_INTERPRET when it is
imported. bfloat16 is left out: the interpreter multiplies its bits as integers. tests/gpu has it.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch

from tests.support import tiny_models
from tests.support.attention_cases import CALLS, CPU, TOLERANCE, Case, attend, by_hand, make_case
from tests.support.in_process import InProcess
from tests.support.loading import load
from tests.support.tiny_models import gemma2, gpt_oss, llama
from worker import runner
from worker.attention.cuda import TritonBackend
from worker.attention.reference import ReferenceBackend

assert os.environ.get("TRITON_INTERPRET") == "1", "run by tests/worker/test_triton.py"
pytest_plugins = ("tests.worker.conftest",)  # its fixtures
# numpy warns where the kernel divides 0 by 0 in rows of a tile that belong to no query
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

# (query length, sequence length), few and small, for the interpreter is slow: a decode of one token
# and one of two pieces, requests of no token, a short request of two tokens and two pieces, a chunk
SHAPES = [(1, 1), (0, 0), (1, 70), (2, 66), (7, 33), (0, 12)]
SPLIT = 64


def backend(**settings: int) -> TritonBackend:
    return TritonBackend(CPU, **{"split": SPLIT, "num_programs": 3, **settings})


def num_items(it: TritonBackend) -> int:
    """Short requests' pieces of the last step."""
    (starts,) = it._starts.values()
    return int(starts[0, -1])


def check(case: Case, it: TritonBackend | None = None) -> None:
    out = attend(it or backend(), case)
    assert out.dtype == case.query.dtype
    assert (out - by_hand(case)).abs().max() < TOLERANCE[case.query.dtype]


@pytest.mark.parametrize("call", [CALLS["plain"], CALLS["window"], CALLS["all"]], ids=str)
def test_agrees_with_float64_arithmetic(call):
    """Masks, windows, softcap and sinks, in split, short and long requests at once. Blocks that
    nobody owns are NaN, so that a read beside the tables shows."""
    check(make_case(SHAPES, 3, 16, torch.float32, page_size=16, **call))


@pytest.mark.parametrize(
    ("grouped", "head_dim", "dtype", "page_size"),
    [
        (1, 64, torch.float16, 16),
        (4, 80, torch.float16, 32),
        (8, 12, torch.float32, 16),
        (20, 16, torch.float32, 5),  # three queries a tile
    ],
)
def test_head_sizes_groups_types_and_pages(grouped, head_dim, dtype, page_size):
    """Heads that are no power of two or below the smallest tile, groups that are no power of two
    or larger than a tile, pages of any size."""
    check(make_case([(1, 70), (9, 33)], grouped, head_dim, dtype, page_size, **CALLS["all"]))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(torch.float32, torch.float16), (torch.float16, torch.float32)]
)
def test_pools_of_another_dtype(dtype, kv_dtype):
    """kv_cache_dtype: products are taken in the query's dtype, whatever the pool holds."""
    check(make_case([(1, 70), (9, 33)], 3, 16, dtype, 16, kv_dtype=kv_dtype, **CALLS["all"]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("grouped", [1, 3, 4, 8])
def test_every_combination(grouped, head_dim, dtype):
    """What one of the two tests above would miss: an error of several settings together."""
    shapes = [*SHAPES, (40, 70), (29, 150)]
    for page_size, call in zip((16, 32, 16, 32, 16, 32), CALLS.values(), strict=True):
        check(make_case(shapes, grouped, head_dim, dtype, page_size, **call))


def test_tables_that_start_with_the_window():
    """Sliding tables leave out what the window no longer reads: first_positions counts. The window
    ends in another piece than it begins in."""
    shapes = [(1, 90), (4, 75), (20, 120)]
    case = make_case(shapes, 3, 16, torch.float32, 16, window_tables=True, sliding_window=40)
    assert case.context.groups[0].first_positions.all()
    it = backend()
    check(case, it)
    assert num_items(it) == 4  # both short ones are split


def test_split_or_whole_or_without_room():
    """A request whose pieces find no room must come out the same to the last bit, and one that is
    not split at all the same but for rounding."""
    case = make_case([(1, 150), (4, 70)], 3, 16, torch.float32, 16, softcap=5.0, sinks=True)
    roomy, tight, none, whole = (
        backend(),
        backend(workspace_bytes=4 * 6 * (16 + 2) * 4),  # 4 parts, enough for the first request
        backend(workspace_bytes=0),
        backend(split=1024),
    )
    split = attend(roomy, case)
    assert torch.equal(attend(tight, case), split)
    assert torch.equal(attend(none, case), split)
    assert (attend(whole, case) - split).abs().max() < TOLERANCE[torch.float32]
    counts = [num_items(it) for it in (roomy, tight, none, whole)]
    assert counts[0] > counts[1] > counts[2] == counts[3] == 2


def test_a_decode_has_the_same_bits_alone_and_in_any_batch():
    """What makes a greedy answer independent of its neighbours. One of them is poisoned, too."""
    case = make_case(SHAPES, 3, 16, torch.float32, 16, **CALLS["sinks"])
    together = attend(backend(), case)
    starts = case.context.query_start_loc.tolist()
    for request in (2, 3):
        own = slice(starts[request], starts[request + 1])
        assert torch.equal(attend(backend(), case.alone(request)), together[own])
    case.key[starts[4]] = math.nan  # the chunk's
    poisoned = attend(backend(num_programs=50), case)
    assert poisoned[starts[4] : starts[5]].isnan().all()
    assert torch.equal(poisoned[: starts[4]], together[: starts[4]])
    assert torch.equal(poisoned[starts[5] :], together[starts[5] :])


def test_writes_land_in_their_slots_and_nowhere_else():
    """A stray write corrupts another request's KV. Tokens of no request, as padding of a graph has
    them, write where they are told and come out as zeros."""
    case = make_case([(1, 1), (2, 3), (5, 37)], 3, 12, torch.float16, 16)
    before = case.pages.clone()
    num_padding = 3
    write_block = 1
    slots = torch.cat([
        case.context.groups[0].slot_mapping,
        torch.arange(num_padding) + write_block * 16,
    ])  # fmt: skip
    query, key, value = (
        # as models hand them over: heads first in memory
        torch.randn(heads, len(slots), 12, dtype=torch.float16).transpose(0, 1)
        for heads in (6, 2, 2)
    )
    tables = replace(case.context.groups[0], slot_mapping=slots)
    context = replace(case.context, groups=(tables,), on_host=None)
    padded = replace(case, query=query, key=key, value=value, context=context)
    out = attend(backend(), padded)
    expected = before
    for token, slot in enumerate(slots.tolist()):
        expected[slot // 16, 0, :, slot % 16] = key[token]
        expected[slot // 16, 1, :, slot % 16] = value[token]
    assert torch.equal(case.pages.view(torch.int16), expected.view(torch.int16))
    assert out[:-num_padding].isfinite().all()
    assert out[:-num_padding].any(dim=-1).all()
    assert not out[-num_padding:].any()


def test_more_requests_than_are_planned_at_once(monkeypatch):
    """plan_work takes requests in blocks: sums must carry over."""
    monkeypatch.setattr("worker.attention.cuda._REQUESTS_AT_ONCE", 2)
    shapes = [(1, 70), (0, 0), (1, 3), (7, 7), (1, 65), (0, 0), (6, 9)]
    check(make_case(shapes, 3, 16, torch.float32, 16))


@pytest.mark.slow
@pytest.mark.parametrize("family", [llama, gemma2, gpt_oss])
def test_models_answer_as_with_the_reference(tmp_path, monkeypatch, family):
    """The backend within a step: strides as models hand them over, several cache groups, chunks,
    decodes beside them, each family's window, softcap and sinks."""
    prompts, max_tokens = [[5, 6, 7], [9] * 40, list(range(20, 91))], [3, 4, 3]
    tiny_models.save(family(), tmp_path)
    loaded = load(tmp_path)
    answers = []
    for chosen in (ReferenceBackend(), backend(split=64)):
        monkeypatch.setattr(runner, "choose_backend", lambda *_, chosen=chosen: chosen)
        it = InProcess(loaded, max_batch_tokens=33)
        answers.append(it.answers(prompts, max_tokens, stagger=1))
    for one, other in zip(*answers, strict=True):
        assert one.tokens == other.tokens
        assert (one.logits - other.logits).abs().max() < 1e-4
