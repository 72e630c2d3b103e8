"""What an operator may see of the state; field names are those of protos/admin.proto."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.request import NO_ROW, Request, RequestState
from scheduler_svc.core.state import State


@dataclass(frozen=True, slots=True)
class RequestView:
    request_id: str
    index: int  # among its siblings
    state: str
    offloaded: bool
    priority: int
    prompt_tokens: int
    computed_tokens: int
    completion_tokens: int
    max_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class BlockTableView:
    group: str
    first_position: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class RequestDetail:
    summary: RequestView
    row: int | None
    plans_in_flight: int
    token_ids: list[int]
    block_tables: list[BlockTableView]


@dataclass(frozen=True, slots=True)
class CacheGroupView:
    group: str
    num_layers: int
    sliding_window: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_owned: int


@dataclass(frozen=True, slots=True)
class CacheView:
    page_size: int
    chunks_total: int
    chunks_free: int
    chunk_bytes: int
    groups: list[CacheGroupView]
    tokens_stored: int
    utilisation: float
    prefix_queries: int
    prefix_hits: int
    swap_chunks_total: int
    swap_chunks_free: int
    offloads: int
    restores: int
    soft_resets: int
    drafted_tokens: int
    accepted_tokens: int


def list_requests(state: State, wanted: str = "", limit: int = 100) -> list[RequestView]:
    """Live requests, and siblings, in order of arrival: those in the state `wanted`, if not
    empty, and at most `limit`. Costs what they and the rows are, not what waits behind them."""
    requests: Iterable[Request] = state.live()
    if wanted in (RequestState.PREFILLING, RequestState.DECODING):
        requests = sorted(state.rows.running.values(), key=lambda request: request.ticket)
    if wanted:
        requests = (request for request in requests if request.state == wanted)
    if wanted == RequestState.FINISHED:
        requests = ()  # they are not live
    return [_view(state, request) for request in itertools.islice(requests, limit)]


def count_requests(state: State, wanted: str = "") -> int:
    """How many there are, without a limit."""
    if not wanted:
        return state.num_live
    with_row = Counter(request.state for request in state.rows.running.values())
    with_row.pop(RequestState.FINISHED, None)
    if wanted == RequestState.PENDING:
        return state.num_live - with_row.total()
    return with_row[RequestState(wanted)]


def get_request(state: State, request_id: str) -> RequestDetail | None:
    """All that is known of a live request (of its first sibling that lives), or None."""
    family = state.requests.get(request_id)
    if family is None:
        return None
    request = family[0]
    row = None if request.row == NO_ROW else request.row
    return RequestDetail(
        summary=_view(state, request),
        row=row,
        plans_in_flight=(
            request.num_in_flight if row is None else int(state.rows.num_in_flight[row])
        ),
        token_ids=list(request.token_ids),
        block_tables=[
            BlockTableView(
                group=geometry.kind,
                first_position=(
                    0
                    if row is None
                    else int(state.memory.tables.first[group, row]) * state.geometry.page_size
                ),
                blocks=[] if row is None else state.memory.tables.of(group, row).tolist(),
            )
            for group, geometry in enumerate(state.geometry.groups)
        ],
    )


def get_cache(state: State) -> CacheView:
    """How the KV memory is used; shared blocks count once."""
    stored, could_hold = token_places(state)
    return CacheView(
        page_size=state.geometry.page_size,
        chunks_total=state.memory.device.chunks.num_usable,
        chunks_free=state.memory.device.chunks.num_free,
        chunk_bytes=state.geometry.chunk_bytes,
        groups=[
            CacheGroupView(
                group=geometry.kind,
                num_layers=geometry.num_layers,
                sliding_window=geometry.sliding_window,
                blocks_total=allocator.num_blocks,
                blocks_free=allocator.num_blocks - allocator.num_owned,
                blocks_cached=allocator.num_cached,
                blocks_owned=allocator.num_owned,
            )
            for geometry, allocator in zip(state.geometry.groups, state.memory.groups, strict=True)
        ],
        tokens_stored=stored,
        utilisation=stored / could_hold if could_hold else 0.0,
        prefix_queries=state.memory.prefix_cache.num_queried,
        prefix_hits=state.memory.prefix_cache.num_hit,
        swap_chunks_total=state.memory.swap.chunks.num_usable,
        swap_chunks_free=state.memory.swap.chunks.num_free,
        offloads=state.counters.offloads,
        restores=state.counters.restores,
        soft_resets=state.counters.soft_resets,
        drafted_tokens=state.counters.drafted,
        accepted_tokens=state.counters.accepted,
    )


def token_places(state: State) -> tuple[int, int]:
    """Tokens whose KV is stored, and those that the owned chunks could hold.

    What is lost between the two: the ends of last pages, pages reserved for later, and blocks of
    chunks that nobody owns.
    """
    page_size = state.geometry.page_size
    stored = could_hold = 0
    for group, allocator in enumerate(state.memory.groups):
        stored += allocator.num_owned * page_size - _empty_places(state, group)
        num_chunks = int(np.count_nonzero(allocator.used))
        could_hold += num_chunks * allocator.blocks_per_chunk * page_size
    return stored, could_hold


def _empty_places(state: State, group: int) -> int:
    """Token places of last pages that hold nothing yet; a shared last page counts once."""
    rows, page_size = state.rows, state.geometry.page_size
    running = rows.in_use()
    tables = state.memory.tables
    running = running[tables.end[group, running] > tables.first[group, running]]
    ends = tables.end[group, running]
    tails = tables.blocks[group, running, ends - 1]
    empty = np.maximum(ends * page_size - rows.computed[running], 0)
    _, first = np.unique(tails, return_index=True)
    return int(empty[first].sum())


def _view(state: State, request: Request) -> RequestView:
    has_row = request.row != NO_ROW
    return RequestView(
        request_id=request.request_id,
        index=request.index,
        state=request.state.value,
        offloaded=request.swapped is not None,
        priority=request.priority,
        prompt_tokens=request.num_prompt_tokens,
        computed_tokens=int(state.rows.computed[request.row]) if has_row else 0,
        completion_tokens=request.num_output_tokens,
        max_tokens=request.max_total_tokens - request.num_prompt_tokens,
        preemptions=request.num_preemptions,
    )


def count_by_state(state: State) -> tuple[int, int]:
    """Requests running (with a row, not ended) and waiting."""
    ended = np.count_nonzero(state.rows.is_finished[state.rows.in_use()])
    return len(state.rows.running) - int(ended), len(state.pending)
