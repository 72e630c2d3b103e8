"""What a waiting request begins with when it gets a row: shared blocks, swapped ones, or none."""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from scheduler_svc.core.allocators import Name
from scheduler_svc.core.batch import Admission
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import State


def admission(
    state: State, request: Request, rows: tuple[int, ...], promised: Container[Name] = ()
) -> Admission | None:
    """None while another request fills the block that this one needs next. `promised` are names of
    blocks that requests admitted earlier in the same step will fill."""
    if not state.limits.allow_block_sharing or not request.may_match:
        return alone(state, request, rows)
    swapped = request.swapped
    if swapped is not None:  # what the prefix cache has no more comes from the swap pool
        tables = state.prefix_cache.find(request, swapped)
        return Admission(request, rows, swapped.num_tokens, swapped.first_pages, tables, swapped)
    hit = state.prefix_cache.match(request, promised)
    if hit is None:
        return None
    num_computed = hit.num_pages * state.geometry.page_size
    return Admission(request, rows, num_computed, hit.first_pages, hit.blocks)


def alone(state: State, request: Request, rows: tuple[int, ...]) -> Admission:
    """What it begins with when it shares nothing."""
    if request.swapped is None:
        groups, nothing = len(state.allocators), np.zeros(0, np.int32)
        return Admission(request, rows, 0, (0,) * groups, (nothing,) * groups)
    swapped = request.swapped
    tables = tuple(np.full(len(blocks), -1, np.int32) for blocks in swapped.blocks)
    return Admission(request, rows, swapped.num_tokens, swapped.first_pages, tables, swapped)
