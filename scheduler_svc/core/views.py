"""What an operator may see of the state; field names are those of protos/admin.proto."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.request import NO_ROW, Request, RequestState
from scheduler_svc.core.state import State


@dataclass(frozen=True, slots=True)
class RequestView:
    request_id: str
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
    soft_resets: int


def list_requests(state: State) -> list[RequestView]:
    """Every live request, in order of arrival."""
    return [_view(state, request) for request in state.requests.values()]


def get_request(state: State, request_id: str) -> RequestDetail | None:
    """All that is known of a live request, or None."""
    request = state.requests.get(request_id)
    if request is None:
        return None
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
                first_position=0,
                blocks=[] if row is None else state.rows.blocks_of(group, row).tolist(),
            )
            for group, geometry in enumerate(state.geometry.groups)
        ],
    )


def get_cache(state: State) -> CacheView:
    """How the KV memory is used. Shared blocks count once; a page owned in part counts whole."""
    rows, page_size = state.rows, state.geometry.page_size
    running = rows.order()
    stored = int(rows.computed[running].sum())
    could_hold = sum(allocator.num_owned for allocator in state.allocators) * page_size
    return CacheView(
        page_size=page_size,
        chunks_total=state.pool.num_usable,
        chunks_free=state.pool.num_free,
        chunk_bytes=state.geometry.chunk_bytes,
        groups=[
            CacheGroupView(
                group=geometry.kind,
                num_layers=geometry.num_layers,
                sliding_window=0,
                blocks_total=allocator.num_blocks,
                blocks_free=allocator.num_blocks - allocator.num_owned,
                blocks_cached=0,
                blocks_owned=allocator.num_owned,
            )
            for geometry, allocator in zip(state.geometry.groups, state.allocators, strict=True)
        ],
        tokens_stored=stored,
        utilisation=stored * len(state.allocators) / could_hold if could_hold else 1.0,
        soft_resets=state.num_soft_resets,
    )


def _view(state: State, request: Request) -> RequestView:
    has_row = request.row != NO_ROW
    return RequestView(
        request_id=request.request_id,
        state=request.state.value,
        offloaded=False,
        priority=request.priority,
        prompt_tokens=request.num_prompt_tokens,
        computed_tokens=int(state.rows.computed[request.row]) if has_row else 0,
        completion_tokens=request.num_output_tokens,
        max_tokens=request.max_total_tokens - request.num_prompt_tokens,
        preemptions=request.num_preemptions,
    )


def count_by_state(state: State) -> tuple[int, int]:
    """Requests running (with a row, not ended) and waiting."""
    ended = sum(r.state is RequestState.FINISHED for r in state.rows.running.values())
    return len(state.rows.running) - ended, len(state.pending)
