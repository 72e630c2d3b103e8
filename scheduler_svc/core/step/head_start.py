"""The KV that a waiting request starts with: shared blocks, swapped-out ones, or none."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.request import Request
from scheduler_svc.core.state import State
from scheduler_svc.core.step.batch import Admission


def admission(state: State, request: Request) -> Admission | None:
    """The request's admission, with as much KV as is available; None while another request fills
    the block that it needs next."""
    if not state.limits.allow_block_sharing or not request.may_match:
        return alone(state, request)
    cache, swapped = state.memory.prefix_cache, request.swapped
    if swapped is not None:  # the swap pool has what the prefix cache lost
        tables = cache.find(request, swapped)
        return Admission(request, swapped.num_tokens, swapped.first_pages, tables, swapped)
    hit = cache.match(request)
    if hit is None:
        return None
    num_computed = hit.num_pages * state.memory.page_size
    return Admission(request, num_computed, hit.first_pages, hit.blocks)


def alone(state: State, request: Request) -> Admission:
    """The request's admission without shared blocks."""
    swapped = request.swapped
    if swapped is None:
        groups, nothing = len(state.memory.groups), np.zeros(0, np.int32)
        return Admission(request, 0, (0,) * groups, (nothing,) * groups)
    tables = tuple(np.full(len(blocks), -1, np.int32) for blocks in swapped.blocks)
    return Admission(request, swapped.num_tokens, swapped.first_pages, tables, swapped)
