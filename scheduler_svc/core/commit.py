"""Applies a decision to the state. It cannot fail: `decide` has counted what it takes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from protos.plan import Int32
from scheduler_svc.core.batch import Admission, Decision
from scheduler_svc.core.request import Request, RequestState
from scheduler_svc.core.state import InFlight, State, Transfers


def commit(state: State, decision: Decision) -> InFlight | None:
    """What is now in flight, to be packed and sent; None when the step computes nothing."""
    for request in decision.soft_resets:
        state.soft_reset(request)
    for request in decision.offloads:
        state.offload(request)
    if not state.rows.running:
        for request in decision.soft_resets + decision.offloads:
            # its blocks lay badly, so they are not to be found again (shortage.py)
            request.may_match = False
    if not len(decision.rows):
        state.recall_offloads()
        return None
    table, rows = state.rows, decision.rows
    # all sharing before any taking: what is shared must not be reclaimed for somebody else
    for admission in decision.admissions:
        _assign(state, admission)
    tail_copies = _still_shared(state, decision)
    state.pool.num_spare = _spare_chunks(state, decision, tail_copies)
    freed_swap = [
        swapped for admission in decision.admissions for swapped in _restore(state, admission)
    ]
    copies_any = tail_copies.any()
    for group in range(len(state.allocators)):
        if copies_any:
            _copy_tails(state, group, rows[tail_copies[group]])
        _extend_tables(state, group, rows, decision.new_blocks[group])

    ends = table.computed[rows] + decision.num_new_tokens
    samples = ends == table.known[rows] + table.outstanding[rows]
    if state.policy.holds_finished:  # a row that has ended computes its last token again
        has_ended = table.is_finished[rows]
        ends -= has_ended
        samples &= ~has_ended
    table.computed[rows] = ends
    sampled = samples.nonzero()[0]
    sampled_rows = rows[sampled]
    table.outstanding[sampled_rows] += 1
    table.unplanned[sampled_rows] -= 1
    for row in sampled_rows[~table.is_decoding[sampled_rows]].tolist():
        table.is_decoding[row] = True
        table.running[row].state = RequestState.DECODING
    sampled_for = sampled
    named = rows
    requests = table.tenants(rows)
    new_tenants = [admission.request.row for admission in decision.admissions]
    parents = sampled[table.will_fork[sampled_rows]]
    if len(parents):
        forks = [
            (place, sibling)
            for place in parents.tolist()
            for sibling in _fork(state, requests[place])
        ]
        new_tenants += [sibling.row for _, sibling in forks]
        sampled = np.concatenate([sampled, [place for place, _ in forks]])
        sampled_for = np.concatenate([sampled_for, np.arange(len(forks)) + len(rows)])
        named = np.concatenate([rows, np.array([s.row for _, s in forks], np.int32)])
        requests = requests + [sibling for _, sibling in forks]
    table.num_in_flight[named] += 1
    step = InFlight(
        step_id=state.next_step_id,
        rows=rows,
        num_new_tokens=decision.num_new_tokens,
        ends=ends,
        named=named,
        generation=table.generation[named],
        requests=requests,
        sampled=sampled,
        sampled_for=sampled_for,
        new_tenants=np.array(new_tenants, np.int32),
        transfers=state.transfers,
        freed_swap=freed_swap,
    )
    state.transfers = Transfers()
    state.left_out = decision.left_out
    state.next_step_id += 1
    state.in_flight.append(step)
    state.suspects.took_turn(requests[0])
    return step


def _still_shared(state: State, decision: Decision) -> npt.NDArray[np.bool_]:
    """Which of the decided tail copies are needed: not those of whom every sharer has copied or
    was preempted after the copy had been decided. [G, R]"""
    is_needed = decision.tail_copies.astype(np.bool_)
    if not is_needed.any():
        return is_needed
    copied: Counter[tuple[int, int]] = Counter()  # (group, block)
    for group, place in np.argwhere(is_needed).tolist():
        row = int(decision.rows[place])
        tail = state.rows.tail_block(group, row, state.geometry.page_size)
        owners = int(state.allocators[group].owners[tail]) - copied[group, tail]
        is_needed[group, place] = owners > 1
        copied[group, tail] += 1
    return is_needed


def _spare_chunks(state: State, decision: Decision, tail_copies: npt.NDArray[np.bool_]) -> int:
    """Free chunks that the decision leaves, though it first uses up what the groups hold."""
    spare = state.pool.num_free
    for group, allocator in enumerate(state.allocators):
        count = int(decision.new_blocks[group].sum() + tail_copies[group].sum())
        count += sum(int((a.tables[group] < 0).sum()) for a in decision.admissions)
        spare -= allocator.chunks_for(count, allocator.num_free)
    assert spare >= 0, f"decided on {-spare} chunks more than there are"
    return spare


def _assign(state: State, admission: Admission) -> None:
    """Gives the request and its siblings their rows, and the blocks that they share."""
    request, rows = admission.request, state.rows
    state.pending.remove(request)
    if not request.was_admitted:
        request.was_admitted = True
        if state.limits.allow_block_sharing:
            request.num_cached_tokens = admission.num_computed
            state.prefix_cache.count(request, admission.num_computed)
    row, *sibling_rows = admission.rows
    rows.assign(request, row)
    request.may_match = True
    request.hit = None
    request.state = RequestState.PREFILLING
    rows.computed[row] = admission.num_computed
    for sibling, sibling_row in zip(request.siblings, sibling_rows, strict=True):
        rows.assign(sibling, sibling_row)
        rows.await_fork(sibling_row)
        sibling.was_admitted = True  # its prompt was looked up with the first one's
        sibling.num_cached_tokens = request.num_cached_tokens
        sibling.state = RequestState.PREFILLING
    for group, blocks in enumerate(admission.tables):
        state.allocators[group].share(blocks[blocks >= 0])
        rows.set_table(group, row, admission.first_pages[group], blocks)
    if admission.swapped is None:
        pages = admission.num_computed // state.geometry.page_size
        rows.published[row] = pages
        if state.limits.allow_block_sharing:
            state.prefix_cache.promise(request, pages)


def _restore(state: State, admission: Admission) -> list[tuple[int, Int32]]:
    """Brings swapped blocks back into new ones; the swap blocks that are free after the plan."""
    request, swapped = admission.request, admission.swapped
    if swapped is None:
        return []
    for group, blocks in enumerate(admission.tables):
        gaps = np.flatnonzero(blocks < 0)
        fresh = state.allocators[group].take(len(gaps))
        first = admission.first_pages[group]
        state.rows.table[group, request.row, first + gaps] = fresh
        pairs = zip(swapped.blocks[group][gaps].tolist(), fresh.tolist(), strict=True)
        state.transfers.swap_in += [(group, source, block) for source, block in pairs]
    request.swapped = None
    state.counters.restores += 1
    return list(enumerate(swapped.blocks))


def _copy_tails(state: State, group: int, rows: Int32) -> None:
    """Gives each of the rows a block of its own for its next token, in place of the shared one
    and with its content."""
    allocator = state.allocators[group]
    for row in rows.tolist():
        page = state.rows.computed[row] // state.geometry.page_size
        shared = int(state.rows.table[group, row, page])
        (own,) = allocator.take(1).tolist()
        state.transfers.copy.append((group, shared, own))
        state.rows.table[group, row, page] = own
        allocator.give(np.array([shared], np.int32))


def _extend_tables(state: State, group: int, rows: Int32, counts: Int32) -> None:
    """Takes counts[i] blocks for rows[i] and writes them behind its block table. [R]"""
    grows = counts.nonzero()[0]
    if not len(grows):
        return
    rows, counts = rows[grows], counts[grows]
    blocks = state.allocators[group].take(int(counts.sum()))
    grown = rows.repeat(counts)
    place_in_row = np.arange(len(blocks)) - (counts.cumsum() - counts).repeat(counts)
    state.rows.table[group, grown, state.rows.table_len[group, grown] + place_in_row] = blocks
    state.rows.table_len[group, rows] += counts


def _fork(state: State, parent: Request) -> list[Request]:
    """The siblings, now sharing the blocks of the prompt that this step completes."""
    rows, row = state.rows, parent.row
    siblings, parent.siblings = parent.siblings, []
    rows.will_fork[row] = False
    for sibling in siblings:
        rows.awaits_fork[sibling.row] = False
        sibling.state = RequestState.DECODING
        for name in ("computed", "outstanding", "unplanned", "is_decoding", "published"):
            getattr(rows, name)[sibling.row] = getattr(rows, name)[row]
        pages = -(-int(rows.computed[row]) // state.geometry.page_size)
        for group, allocator in enumerate(state.allocators):
            # what the sibling's own queries read: not all that this step's do
            first = allocator.first_page(int(rows.computed[row]))
            blocks = rows.table[group, row, first:pages]
            allocator.share(blocks)
            rows.set_table(group, sibling.row, first, blocks)
    return siblings
