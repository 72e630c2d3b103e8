"""Paged attention in Triton: the four kernels of a layer's attention.

    plan_work   once per forward and window: which requests are short or long, in how many pieces
    write_kv    new keys and values into their slots
    attend      a share of the queries over a share of their keys
    merge       combines the pieces of short requests whose keys were split

A request is short if its queries, times the heads that share a KV head, fit into one small tile
(all decodes do). Its keys are then split into pieces of SPLIT positions, which run in parallel. A
long one (a chunk of a prompt) is divided into tiles of queries instead, each of which loops over
all its keys.

The amount of work is in device memory only: `starts` [3, R + 1] contains prefix sums over the
requests, and programs loop over items up to their total. So no launch depends on a length, and the
launches can be captured in a graph.

A request's bits depend on itself alone: splits and key tiles begin at fixed positions, pieces are
merged in order of position, and every maximum is rounded up to an integer (in powers of two), so
that rescaling is exact, wherever it happens. So a request whose pieces do not fit into `partials`
is processed piece by piece by one program, with the same result.

Owns: the arithmetic. Does not own: launching, tile sizes, memory (cuda.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Rows of `starts`: items of short requests, their places in `partials`, tiles of long requests.
SHORT_ITEMS = tl.constexpr(0)
PARTS = tl.constexpr(1)
LONG_ITEMS = tl.constexpr(2)

# Arguments that vary from step to step must not create new variants of a kernel, which would be
# compiled while requests wait. A plan is one buffer: its arrays start at any multiple of 4 bytes.
_TABLES = ["query_start_loc", "seq_lens", "table_start", "blocks", "first_positions"]
_VARYING = [*_TABLES, "slot_mapping", "starts", "num_requests", "window", "capacity"]


def _jit(fn):
    parameters = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    return triton.jit(fn, do_not_specialize=[name for name in parameters if name in _VARYING])


@_jit
def plan_work(
    query_start_loc,  # int32 [R + 1]
    seq_lens,  # int32 [R]
    starts,  # int32 [3, R + 1], written
    num_requests,
    window,
    capacity,  # parts that fit into `partials`
    SHORT: tl.constexpr,  # most queries of a short request
    TILE: tl.constexpr,  # queries of a long request's tile
    SPLIT: tl.constexpr,  # keys of a piece
    BLOCK: tl.constexpr,  # requests at a time
):
    """A single program. A part is one query's result over one piece of its keys."""
    row = num_requests + 1
    items_before = 0
    parts_before = 0
    tiles_before = 0
    for row_index in tl.static_range(3):
        tl.store(starts + row_index * row, 0)
    for first in range(0, num_requests, BLOCK):
        request = first + tl.arange(0, BLOCK)
        exists = request < num_requests
        begin = tl.load(query_start_loc + request, mask=exists, other=0)
        query_len = tl.load(query_start_loc + request + 1, mask=exists, other=0) - begin
        seq_len = tl.load(seq_lens + request, mask=exists, other=0)
        oldest = tl.maximum(seq_len - query_len - window + 1, 0)
        is_short = (query_len > 0) & (query_len <= SHORT)
        pieces = tl.where(is_short, tl.cdiv(seq_len, SPLIT) - oldest // SPLIT, 0)
        parts = tl.where(pieces > 1, pieces * query_len, 0)
        parts_end = parts_before + tl.cumsum(parts, 0)
        items = tl.where(parts_end <= capacity, pieces, tl.minimum(pieces, 1))
        tiles = tl.where(query_len > SHORT, tl.cdiv(query_len, TILE), 0)
        end = starts + request + 1
        tl.store(end + SHORT_ITEMS * row, items_before + tl.cumsum(items, 0), mask=exists)
        tl.store(end + PARTS * row, parts_end, mask=exists)
        tl.store(end + LONG_ITEMS * row, tiles_before + tl.cumsum(tiles, 0), mask=exists)
        items_before += tl.sum(items, 0)
        parts_before += tl.sum(parts, 0)
        tiles_before += tl.sum(tiles, 0)


@_jit
def write_kv(
    key,  # [T, Hkv, D]
    value,
    pages,  # [num_blocks, 2, Hkv, page, D]
    slot_mapping,  # int64 [T]
    out,  # [T, H, D]: zeroed for tokens of no request
    query_start_loc,
    num_requests,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUPED: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,  # KV heads at a time
    BLOCK_D: tl.constexpr,
):
    """Program (token, block of KV heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    exists = (head < NUM_KV_HEADS) & (dim < HEAD_DIM)
    slot = tl.load(slot_mapping + token)
    place = head * (PAGE_SIZE * HEAD_DIM) + dim
    place += (slot // PAGE_SIZE) * block_stride + (slot % PAGE_SIZE) * HEAD_DIM
    k = tl.load(key + token * key_token_stride + head * key_head_stride + dim, mask=exists)
    v = tl.load(value + token * value_token_stride + head * value_head_stride + dim, mask=exists)
    tl.store(pages + place, k.to(pages.dtype.element_ty), mask=exists)
    value_place = place + NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM
    tl.store(pages + value_place, v.to(pages.dtype.element_ty), mask=exists)
    if token >= tl.load(query_start_loc + num_requests):
        nothing = tl.zeros([BLOCK_H, BLOCK_D], out.dtype.element_ty)
        for i in tl.static_range(GROUPED):
            query_head = token * (NUM_KV_HEADS * GROUPED) + head * GROUPED + i
            tl.store(out + query_head * HEAD_DIM + dim, nothing, mask=exists)


@_jit
def attend(
    query,  # [T, H, D]
    out,  # [T, H, D], contiguous
    pages,  # [num_blocks, 2, Hkv, page, D]
    sinks,  # [H] or None
    query_start_loc,  # int32 [R + 1]
    seq_lens,  # int32 [R]
    table_start,  # int32 [R + 1]
    blocks,  # int32 [B]
    first_positions,  # int32 [R]
    starts,  # int32 [3, R + 1]
    partials,  # float32 [capacity, H, D]
    part_scales,  # float32 [capacity, H, 2]: maximum and sum of each part
    num_requests,
    window,
    scaling,
    softcap,
    query_token_stride,
    query_head_stride,
    block_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUPED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,  # 0: the long requests
    CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of a tile: queries times GROUPED, and some unused ones
    BLOCK_N: tl.constexpr,  # keys of a tile
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of two
):
    """Any number of programs: each processes every num_programs'th (item, KV head)."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUPED
    row_starts = num_requests + 1
    items_of = starts + (SHORT_ITEMS if SPLIT else LONG_ITEMS) * row_starts
    num_items = tl.load(items_of + num_requests) * NUM_KV_HEADS
    for index in range(tl.program_id(0), num_items, tl.num_programs(0)):
        kv_head = index % NUM_KV_HEADS
        item = index // NUM_KV_HEADS
        request = _owner(items_of, num_requests, item)
        first_item = tl.load(items_of + request)
        items = tl.load(items_of + request + 1) - first_item
        begin = tl.load(query_start_loc + request)
        query_len = tl.load(query_start_loc + request + 1) - begin
        seq_len = tl.load(seq_lens + request)

        # the item's queries; a row of the tile is one query of one head
        is_part = items > 1 if SPLIT else False
        # tiles of a long request: those with the most keys first
        first = 0 if SPLIT else (first_item + items - 1 - item) * BLOCK_Q
        row = tl.arange(0, BLOCK_M)
        token = first + row // GROUPED
        head = kv_head * GROUPED + row % GROUPED
        is_row = (row < BLOCK_Q * GROUPED) & (token < query_len)
        dim = tl.arange(0, BLOCK_D)[None, :]
        is_wanted = is_row[:, None] & (dim < HEAD_DIM)
        flat_token = (begin + token).to(tl.int64)
        of_query = flat_token * query_token_stride + head * query_head_stride
        q = tl.load(query + of_query[:, None] + dim, mask=is_wanted, other=0.0)
        position = seq_len - query_len + token

        # the keys that any of these queries attends to
        key_begin = tl.maximum(seq_len - query_len + first - window + 1, 0)
        key_end = seq_len - query_len + tl.minimum(first + BLOCK_Q, query_len)
        table = blocks + tl.load(table_start + request)
        table_position = tl.load(first_positions + request)
        of_head = pages + kv_head * (PAGE_SIZE * HEAD_DIM)

        if SPLIT:
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            values = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            # one piece, or all if the parts did not fit
            piece = key_begin // SPLIT
            last_piece = tl.cdiv(key_end, SPLIT)
            if is_part:
                piece += item - first_item
                last_piece = piece + 1
            for i in range(piece, last_piece):
                piece_begin = tl.maximum(i * SPLIT, key_begin)
                piece_end = tl.minimum((i + 1) * SPLIT, key_end)
                new_top, new_total, new_values = _scan(
                    q, position, piece_begin, piece_end, window, of_head, block_stride, table,
                    table_position, scaling, softcap, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, CAPPED,
                    BLOCK_M, BLOCK_N, BLOCK_D,
                )  # fmt: skip
                top, old_scale, new_scale = _scales(top, new_top)
                total = total * old_scale + new_total * new_scale
                values = values * old_scale[:, None] + new_values * new_scale[:, None]
        else:
            top, total, values = _scan(
                q, position, key_begin, key_end, window, of_head, block_stride, table,
                table_position, scaling, softcap, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, CAPPED,
                BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip

        if is_part:
            part = tl.load(starts + PARTS * row_starts + request)
            part += (item - first_item) * query_len + token
            place = part.to(tl.int64) * (NUM_KV_HEADS * GROUPED) + head
            tl.store(partials + place[:, None] * HEAD_DIM + dim, values, mask=is_wanted)
            tl.store(part_scales + place * 2, top, mask=is_row)
            tl.store(part_scales + place * 2 + 1, total, mask=is_row)
        else:
            if sinks is not None:
                sink = tl.load(sinks + head, mask=is_row, other=0.0)
                total, scale = _with_sink(top, total, sink)
                values = values * scale[:, None]
            place = flat_token * (NUM_KV_HEADS * GROUPED) + head
            result = (values / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + place[:, None] * HEAD_DIM + dim, result, mask=is_wanted)


@_jit
def merge(
    out,  # [T, H, D], contiguous
    sinks,  # [H] or None
    query_start_loc,
    starts,
    partials,
    part_scales,
    num_requests,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (request, head): combines pieces in the order in which `attend` combines them."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    row_starts = num_requests + 1
    items_of = starts + SHORT_ITEMS * row_starts + request
    pieces = tl.load(items_of + 1) - tl.load(items_of)
    if pieces > 1:
        begin = tl.load(query_start_loc + request)
        query_len = tl.load(query_start_loc + request + 1) - begin
        first_part = tl.load(starts + PARTS * row_starts + request).to(tl.int64)
        dim = tl.arange(0, BLOCK_D)
        is_dim = dim < HEAD_DIM
        for token in range(query_len):
            top = float("-inf")
            total = 0.0
            values = tl.zeros([BLOCK_D], tl.float32)
            # unrolled, so that loads do not wait for each other
            for piece in tl.range(0, pieces, loop_unroll_factor=4):
                place = (first_part + piece * query_len + token) * NUM_HEADS + head
                new_values = tl.load(partials + place * HEAD_DIM + dim, mask=is_dim, other=0.0)
                new_top = tl.load(part_scales + place * 2)
                new_total = tl.load(part_scales + place * 2 + 1)
                top, old_scale, new_scale = _scales(top, new_top)
                total = total * old_scale + new_total * new_scale
                values = values * old_scale + new_values * new_scale
            if sinks is not None:
                total, scale = _with_sink(top, total, tl.load(sinks + head))
                values = values * scale
            place = (begin + token).to(tl.int64) * NUM_HEADS + head
            result = (values / total).to(out.dtype.element_ty)
            tl.store(out + place * HEAD_DIM + dim, result, mask=is_dim)


@triton.jit
def _owner(starts, num_requests, item):
    """The request r with starts[r] <= item < starts[r + 1]."""
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        is_right = tl.load(starts + middle) <= item
        low = tl.where(is_right, middle, low)
        high = tl.where(is_right, high, middle)
    return low


@triton.jit
def _scan(
    q,  # [BLOCK_M, BLOCK_D]
    position,  # [BLOCK_M]
    key_begin,
    key_end,
    window,
    of_head,  # the pages of one KV head
    block_stride,
    table,
    table_position,
    scaling,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Partial softmax over keys [key_begin, key_end): an integer not below the largest score (in
    powers of two), the sum of weights relative to it, and the weighted values. Key tiles begin at
    multiples of BLOCK_N, wherever key_begin is."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(key_begin // BLOCK_N * BLOCK_N, key_end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        # other pages must not be read: they may contain NaN, and NaN times 0 is NaN
        is_key = (key >= key_begin) & (key < key_end)
        block = tl.load(table + (key - table_position) // PAGE_SIZE, mask=is_key, other=0)
        place = block.to(tl.int64) * block_stride + key % PAGE_SIZE * HEAD_DIM
        is_wanted = is_key[:, None] & (dim < HEAD_DIM)
        k = tl.load(of_head + place[:, None] + dim, mask=is_wanted, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAPPED:
            scores = _tanh(scores * (scaling / softcap)) * (softcap * LOG2E)
        else:
            scores = scores * (scaling * LOG2E)
        is_visible = is_key[None, :] & (key[None, :] <= position[:, None])
        is_visible &= key[None, :] > position[:, None] - window
        scores = tl.where(is_visible, scores, float("-inf"))
        tile_top = tl.ceil(tl.max(scores, 1))
        top, old_scale, _ = _scales(top, tile_top)
        weights = tl.exp2(scores - tl.where(top == float("-inf"), 0.0, top)[:, None])
        total = total * old_scale + tl.sum(weights, 1)
        of_value = of_head + NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM
        v = tl.load(of_value + place[:, None] + dim, mask=is_wanted, other=0.0).to(q.dtype)
        values = values * old_scale[:, None]
        values = tl.dot(weights.to(q.dtype), v, values, input_precision="ieee")
    return top, total, values


@triton.jit
def _scales(top, other):
    """The larger maximum, and the factors, powers of two, for results relative to either of them.
    A maximum of -inf means that there is nothing to scale."""
    larger = tl.maximum(top, other)
    finite = tl.where(larger == float("-inf"), 0.0, larger)
    return larger, tl.exp2(top - finite), tl.exp2(other - finite)


@triton.jit
def _with_sink(top, total, sink):
    """The sum of weights including the sink's, and the factor for the values."""
    sink = sink.to(tl.float32) * LOG2E
    larger, scale, _ = _scales(top, tl.ceil(sink))
    return total * scale + tl.exp2(sink - larger), scale


@triton.jit
def _tanh(x):
    """tanh, which tl lacks. exp(-2 |x|) cannot overflow."""
    small = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)
