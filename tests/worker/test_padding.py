"""Which shapes steps are padded to."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plan_builder import plan_of
from worker.batch.inputs import prepare_inputs
from worker.batch.padding import MOST_DECODE_SIZES, PaddedShape, PaddedShapes, row_shape
from worker.kv.geometry import FULL_ATTENTION, CacheGroup


def test_decode_sizes_lie_close_together() -> None:
    """1, 2, 4, then steps of 8 to 64: a step of 9 rows must not compute 64."""
    sizes = PaddedShapes(8192, 256, 8).decode_sizes
    assert sizes[:11] == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert sizes[-1] >= 256
    assert all(b <= 1.15 * a + 8 for a, b in itertools.pairwise(sizes))


@given(
    max_batch_tokens=st.integers(1, 20_000),
    max_requests=st.integers(1, 4096),
    interval=st.integers(1, 256),
    multiple=st.sampled_from([1, 4]),
    data=st.data(),
)
def test_every_step_fits_its_shape(
    max_batch_tokens: int, max_requests: int, interval: int, multiple: int, data: st.DataObject
) -> None:
    """A graph that is too small would cut requests off; too many graphs eat memory."""
    shapes = PaddedShapes(max_batch_tokens, max_requests, interval, multiple)
    assert len(shapes.decode_sizes) <= MOST_DECODE_SIZES
    assert not any(size % multiple for size in (*shapes.decode_sizes, *shapes.mixed_sizes))
    requests = data.draw(st.integers(1, min(max_requests, max_batch_tokens)))
    tokens = data.draw(st.integers(requests, max_batch_tokens))
    longest = -(-tokens // requests)
    shape = shapes.shape_of(tokens, requests, requests, longest)
    assert shape is not None
    assert shape.is_static
    assert tokens <= shape.num_tokens <= shapes.most_tokens
    assert requests <= shape.num_requests <= shapes.most_requests
    assert requests <= shape.num_logits <= shapes.most_tokens
    assert longest <= shape.longest_query
    if shape.num_tokens > tokens:
        assert shape.num_requests > requests, "padding tokens need a request"


def test_mixed_steps_are_padded_to_powers_of_two() -> None:
    """Few shapes, so that graphs of mixed steps are found again."""
    shapes = PaddedShapes(2048, 16, 8)
    assert shapes.mixed_sizes == (64, 128, 256, 512, 1024, 2048)
    assert shapes.shape_of(130, 3, 2, 120) == PaddedShape(256, 17, 16, 256, is_static=True)
    assert shapes.shape_of(0, 0, 0, 0) is None


def test_steps_with_more_logits_than_rows_have_no_static_shape() -> None:
    """All graphs share the memory of the largest decode step's logits; a graph of a scored prompt
    would keep as much again, and more, for ever."""
    shapes = PaddedShapes(2048, 40, 8)
    assert shapes.decode_sizes[-1] == 40
    for num_logits, padded in ((3, 16), (33, 40), (40, 40)):
        shape = shapes.shape_of(130, 3, num_logits, 120)
        assert shape is not None
        assert shape.num_logits == padded
    assert shapes.shape_of(130, 3, 41, 120) is None
    assert shapes.shape_of(2048, 3, 2048, 2000) is None


@pytest.mark.parametrize(
    ("shape", "lengths", "pages"),
    [
        (PaddedShape(8, 8, 8, 1), [1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]),
        (PaddedShape(16, 3, 4, 16), [11], [3]),
        (PaddedShape(16, 4, 4, 16), [6, 5], [2, 2]),
    ],
)
def test_padding_tokens_are_shared_out(
    shape: PaddedShape, lengths: list[int], pages: list[int]
) -> None:
    """A padding request reads only the reserved block, however many tokens it has."""
    plan = plan_of(
        token_ids=[7, 8, 9, 10, 11],
        rows=[0, 1],
        query_start_loc=[0, 1, 5],
        seq_lens=[3, 4],
        table_start=[[0, 1, 2]],
        blocks=[5, 6],
        first_positions=[[0, 0]],
    )
    group = CacheGroup(FULL_ATTENTION, (0,), 0, 1)
    inputs = prepare_inputs(plan, [group], 4, shape)
    assert inputs.seq_lens[2:].tolist() == lengths
    assert np.diff(inputs.query_start_loc)[2:].tolist() == lengths
    assert np.diff(inputs.groups[0].table_start)[2:].tolist() == pages
    assert set(inputs.groups[0].blocks[2:].tolist()) <= {group.padding_read_block}
    slots = inputs.groups[0].slot_mapping[5:]
    assert set((slots // 4).tolist()) == {group.padding_write_block}
    # the model's positions stay small: learned ones end somewhere
    assert not inputs.positions[5:].any()
    assert len(inputs.token_ids) == len(inputs.positions) == shape.num_tokens
    assert len(inputs.logits_indices) == shape.num_logits


def test_eager_steps_are_padded_by_rows_only() -> None:
    """Deterministic mode pays for three more rows at most."""
    assert row_shape(5, 2, 2, 4, 4) == PaddedShape(8, 5, 4, 4)
    assert row_shape(5, 2, 0, 4, 1) == PaddedShape(5, 2, 0, 4)
