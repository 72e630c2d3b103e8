"""The invariants of the state. A violation is a bug of ours: it crashes with what was found.

`check_rows` looks at the rows a step touched, at a cost that does not grow with the pool; `check`
at everything. What a server checks when it is idle is in scheduler_svc/core/check.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from protos.plan import Int32
from scheduler_svc.core.check import require as _require
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.request import NO_ROW, Request, RequestState, Sampling
from scheduler_svc.core.state import State


def check_rows(state: State, touched: Int32) -> None:
    """The cursors and block tables of the touched rows."""
    rows = state.rows
    touched = touched[[int(row) in rows.running for row in touched]]
    computed, known, outstanding = (
        rows.computed[touched],
        rows.known[touched],
        rows.outstanding[touched],
    )
    drafts = [rows.running[row].speculate for row in touched.tolist()]
    most = len(state.in_flight) + np.array(drafts, np.int32)
    _require(
        (outstanding >= 0).all() and (outstanding <= most).all(),
        "samples outstanding without a plan in flight",
        outstanding,
    )
    _require((computed <= known + outstanding).all(), "computed past what is known", touched)
    _require((known + outstanding <= rows.limit[touched]).all(), "planned past the end", touched)
    goes_on = ~rows.is_finished[touched] & ~rows.awaits_fork[touched]
    _require(((rows.goal[touched] > 0) == goes_on).all(), "a goal is wrong", touched)
    memory = state.memory
    pages = -(-computed // memory.page_size)
    for group, allocator in enumerate(memory.groups):
        lengths = memory.tables.end[group, touched]
        is_right = (lengths >= pages) if state.holds_ended else (lengths == pages)
        _require(is_right.all(), "a table is not ceil(tokens / page_size) long", touched)
        first = memory.tables.first[group, touched]
        _require(
            (first <= allocator.first_pages(computed)).all(),
            "a table begins behind what the next query reads",
            touched,
        )
        for row in touched.tolist():
            blocks = memory.tables.of(group, row)
            _require((allocator.owners[blocks] > 0).all(), "a table names a free block", row)


def check(state: State) -> None:
    """Everything: each chunk and block accounted for, each request in exactly one place."""
    rows, memory = state.rows, state.memory
    check_rows(state, rows.in_use())
    owned = [memory.tables.of_row(row) for row in rows.running]
    for transfers in [memory.transfers, *(step.transfers for step in state.in_flight)]:
        owned += [tables for _, tables in transfers.quarantined]
    _check_pool(memory.device, owned)
    swapped = [r.swapped.blocks for r in state.live() if r.swapped is not None]
    _check_pool(memory.swap, swapped + [b for step in state.in_flight for b in step.freed_swap])
    _check_names(state)
    for row, request in rows.running.items():
        _check_running(state, row, request)
    _require(len(rows.running) + rows.num_free == rows.num_rows, "rows are lost", rows.num_free)
    unforked = {id(s) for request in state.live() for s in request.siblings}
    waiting = [r for r in state.live() if r.row == NO_ROW and id(r) not in unforked]
    for request in waiting:
        _require(
            request.state is RequestState.PENDING and request in state.pending,
            "a request without a row is not waiting",
            request,
        )
    _require(len(state.pending) == len(waiting), "the queue holds others", len(state.pending))
    _require(state.num_live == len(list(state.live())), "the live are miscounted", state.num_live)
    for request in state.live():
        _check_reports(state, request)
    special = sum(_is_special(request) for request in rows.running.values())
    _require(rows.num_special == special, "special rows are miscounted", rows.num_special)
    beams = [request for request in rows.running.values() if request.beams is not None]
    _require(rows.num_beams == len(beams), "beams are miscounted", rows.num_beams)
    for request in state.live():
        _check_beams(state, request)
    order = [state.policy.urgency(request) for request in state.pending.in_order()]
    _require(order == sorted(order), "the queue is out of order", order)


def _check_running(state: State, row: int, request: Request) -> None:
    rows = state.rows
    _require(request.row == row, "a row's tenant does not know it", request)
    if request.state is RequestState.FINISHED:
        is_held = state.holds_ended or rows.num_in_flight[row] > 0
        _require(is_held, "an ended request holds its row", request)
        return
    family = state.requests.get(request.request_id, [])
    _require(any(r is request for r in family), "a running request is not live", request)
    _require(rows.known[row] == len(request.token_ids), "known differs from token_ids", request)
    _require(request.swapped is None, "a running request is offloaded", request)


def _check_beams(state: State, request: Request) -> None:
    """A group is in one place, and its rows hold the beams of its search."""
    group = request.beams
    if group is None:
        return
    family = state.requests[request.request_id]
    _require(len(family) == len(group.members), "beams are lost", request.name)
    if not group.holders:
        others = [member for member in group.members if member is not group.leader]
        is_whole = {id(m) for m in group.leader.siblings} == {id(m) for m in others}
        _require(is_whole, "a leader has lost siblings", request.name)
        places = {(member.row == NO_ROW, member.state) for member in group.members}
        _require(len(places) == 1, "a group is only partly admitted", (request.name, places))
        _require(group.leader.token_ids == group.tokens_in_common(), "a leader's", request.name)
        return
    _require(all(m.row != NO_ROW for m in group.members), "a beam without a row", request.name)
    _require(not any(m.siblings for m in group.members), "forked twice", request.name)
    for holder, beam in zip(group.holders, group.search.beams, strict=True):
        held = holder.token_ids[holder.num_prompt_tokens :]
        _require(held == beam.token_ids, "a row holds another beam", holder.name)
    holders = {id(holder) for holder in group.holders}
    for member in group.members:
        is_idle = bool(state.rows.awaits_fork[member.row])
        _require(is_idle == (id(member) not in holders), "an idle row holds a beam", member.name)


def _is_special(request: Request) -> bool:
    plain, sampling = Sampling(), request.sampling
    names = "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "bad_words"
    return (
        any(getattr(sampling, name) != getattr(plain, name) for name in names)
        or bool(sampling.min_tokens and sampling.stop_token_ids)
        or (sampling.logprobs, request.prompt_logprobs) != (None, None)
        or request.is_constrained
        or request.beams is not None
    )


def _check_reports(state: State, request: Request) -> None:
    """Log probabilities returned and on their way, and the history."""
    num_new = len(request.token_ids) - len(request.first_tokens)
    wanted = 0 if request.sampling.logprobs is None or request.beams is not None else num_new
    _require(len(request.scores) == wanted, "tokens without scores", request.name)
    if request.prompt_logprobs is not None:
        returned = len(request.prompt_scores)
        _require(request.num_unscored >= 0, "more scores than tokens", request.name)
        pieces = [
            scored
            for step in state.in_flight
            for scored in step.reports.prompts
            if step.requests[scored.place] is request
        ]
        for scored in pieces:
            _require(scored.begin == returned + 1, "scores in flight do not follow", request.name)
            returned = scored.end - 1
        if request.row != NO_ROW:
            computed = int(state.rows.computed[request.row])
            reached = max(min(computed, request.num_prompt_tokens - 1), len(request.prompt_scores))
            _require(returned == reached, "scores are neither here nor in flight", request.name)
    if request.history is not None:
        known = request.token_ids[: request.history.num_seen]
        prompt, output = known[: request.num_prompt_tokens], known[request.num_prompt_tokens :]
        tokens, counts = (array.tolist() for array in request.history.entries())
        found = dict(zip(tokens, counts, strict=True))
        recount = dict.fromkeys(prompt, 0) | Counter(output)
        _require(found == recount, "the history differs from the tokens", request.name)


def _check_pool(pool: BlockPool, owned: Sequence[Sequence[Int32]]) -> None:
    """`owned`: tables [G] of everybody who owns blocks."""
    chunks: list[int] = [*pool.chunks.clean, *pool.chunks.cached]
    counted = pool.chunks.num_free, [allocator.num_free for allocator in pool.allocators]
    _require((pool.counts.free_chunks, pool.counts.free_blocks) == counted, "miscounted", counted)
    for group, allocator in enumerate(pool.allocators):
        named = np.concatenate([*(tables[group] for tables in owned), np.zeros(0, np.int32)])
        owners = np.bincount(named, minlength=len(allocator.owners))
        _require((owners == allocator.owners).all(), "owners differ from the block tables", group)
        used = (owners.reshape(-1, allocator.blocks_per_chunk) > 0).sum(axis=1)
        _require((used == allocator.used).all(), "chunks' use is miscounted", group)
        chunks += allocator.held_chunks()
        free = np.array([*allocator.free, *allocator.cached], np.intp)
        is_free = (owners == 0) & (used > 0).repeat(allocator.blocks_per_chunk)
        times = np.bincount(free, minlength=len(owners))
        _require((times == is_free).all(), "free blocks are lost or doubled", group)
    num_chunks, reserved = pool.chunks.num_chunks, pool.chunks.reserved
    times = np.bincount(np.array(chunks, np.intp), minlength=num_chunks)
    is_right = (times[:reserved] == 0).all() and (times[reserved:] == 1).all()
    is_right &= len(times) == num_chunks
    _require(is_right, "chunks are lost or held twice", np.flatnonzero(times != 1))


def _check_names(state: State) -> None:
    for group, allocator in enumerate(state.memory.groups):
        inverse = {block: name for name, block in allocator.block_of.items()}
        _require(inverse == allocator.name_of, "names and blocks differ", group)
        for block in allocator.name_of:
            if allocator.owners[block] == 0:
                chunk = block // allocator.blocks_per_chunk
                is_kept = block in allocator.cached or chunk in state.memory.device.chunks.cached
                _require(is_kept, "a named block is among those without content", block)
