"""What a Ready may say; a session that begins with nonsense ends at once."""

from __future__ import annotations

import pytest

from protos import link_pb2
from scheduler_svc.core.limits import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    Geometry,
    GroupGeometry,
)
from tests.support.engine_harness import Bench, right

HYBRID = Geometry(
    4,
    12 + 2,
    64,
    (GroupGeometry(FULL_ATTENTION, 1, 1), GroupGeometry(SLIDING_ATTENTION, 2, 1, 5)),
    max_model_len=32,
)


def worker(bench: Bench) -> str:
    bench.turn()
    return bench.engine.status.worker


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, value) for name in ("vocab_size", "max_model_len", "page_size", "num_chunks")
          for value in (0, -1, -(2**31))],
        ("vocab_size", 2**31 - 1),
        ("num_embeddings", -1),
        ("num_embeddings", 2**31 - 1),
        ("num_chunks", 2),
        ("num_chunks", 2**31 - 1),
        ("num_swap_chunks", -1),
        ("num_swap_chunks", 2**31 - 1),
        ("max_logits", -1),
        ("max_logits", 1),  # fewer than rows
        ("chunk_bytes", 0),
        ("chunk_bytes", -(2**63)),
        ("page_size", 5),  # 4 was asked for
        ("max_model_len", 33),  # 32 was asked for
    ],
)  # fmt: skip
def test_a_ready_with_senseless_numbers_is_refused_by_name(
    field: str, value: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Tables of its size are made: the scheduler runs out of memory, or divides by 0."""
    bench = Bench()
    bench.engine._session._configure = link_pb2.Configure(page_size=4, max_model_len=32)
    bench.link.hello()
    bench.link.ready(**{field: value})
    assert worker(bench) == "connecting"
    assert f"it sent an invalid Ready: {field} is {value}" in caplog.text
    bench.connect()
    bench.submit("a", [1, 2, 3])
    bench.serve()
    assert bench.tokens("a") == right([1, 2, 3], 4)


@pytest.mark.parametrize(
    ("index", "changes", "message"),
    [
        (0, {"layers": []}, "cache group 0: it has no layers"),
        (0, {"layers": [-1]}, "layers must be distinct and not negative"),
        (0, {"layers": [1]}, "layers must be distinct"),  # group 1 has it
        (1, {"layers": [1, 1]}, "layers must be distinct"),
        (0, {"layers": list(range(100, 11_000))}, "2 cache groups share 10902 layers"),
        (0, {"blocks_per_chunk": 0}, "blocks_per_chunk is 0"),
        (0, {"blocks_per_chunk": -1}, "blocks_per_chunk is -1"),
        (0, {"blocks_per_chunk": 2**31 - 1}, "blocks_per_chunk is 2147483647"),
        (0, {"kind": "sparse"}, "kind is 'sparse'"),
        (0, {"sliding_window": 7}, "sliding_window is 7 for full_attention"),
        (1, {"sliding_window": 0}, "sliding_window is 0 for sliding_attention"),
        (1, {"sliding_window": -5}, "sliding_window is -5"),
    ],
    ids=str,
)
def test_a_ready_with_senseless_groups_is_refused_by_name(
    index: int, changes: dict[str, object], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As above."""
    bench = Bench(geometry=HYBRID)
    bench.link.hello()
    bench.link.ready(group=(index, changes))
    assert worker(bench) == "connecting"
    assert message in caplog.text
    bench.connect()
    assert worker(bench) == "ready"


def test_a_ready_whose_tables_would_fill_the_memory_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each number may pass by itself."""
    bench = Bench(num_rows=1024, max_batch_tokens=1024)
    bench.link.hello()
    bench.link.ready(max_model_len=2**31 - 1, page_size=1, num_chunks=2**22)
    assert worker(bench) == "connecting"
    assert "block tables of 1024 requests" in caplog.text
