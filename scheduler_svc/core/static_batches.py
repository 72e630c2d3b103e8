"""The classic baseline: padded batches, as `generate` computes them, with our own kernels.

A batch is admitted whole, when nothing else runs: as many waiting requests as there are rows and,
with pages for prompt + max_tokens reserved, blocks. Its prompts are computed first, all of them, in
as many steps as the token budget asks for; then every step computes every row, ended ones too,
until the last has ended. So it wastes what padded generation wastes, and nothing else differs
from the other policies. Requests with siblings are refused: their blocks cannot be reserved.
"""

from __future__ import annotations

import sys

import numpy as np

from scheduler_svc.core.batch import Admission, Batch
from scheduler_svc.core.state import State


def fill_static_batch(state: State, batch: Batch) -> None:
    """Adds what a static batch computes next; the whole batch, whatever it reads."""
    batch.pages_left = sys.maxsize
    rows = state.rows
    order = rows.order()
    if not len(order):
        _admit_batch(state, batch)
        return
    prefilling = order[~rows.is_decoding[order] & ~rows.is_finished[order]]
    if len(prefilling):
        for row in prefilling.tolist():
            batch.add_row(row, int(rows.known[row] - rows.computed[row]), int(rows.limit[row]))
        return
    goes_on = rows.goes_on(order)
    if goes_on.any():
        # a row that is sure to end by length with the plans in flight is computed on as well,
        # but only once its end has come back: until then its last token is not known; one that
        # was aborted before any step computed it has no last token
        has_ended = rows.is_finished[order] & (rows.computed[order] > 0)
        batch.add_decoding(order[goes_on | has_ended])


def _admit_batch(state: State, batch: Batch) -> None:
    """Gives rows to all that fit; those whose prompts this step has no tokens left for are
    computed by the next steps, which find the blocks that were counted here."""
    new_rows = state.rows.next_free(state.rows.num_free)
    nothing = np.zeros(0, np.int32)
    groups = len(state.allocators)
    cell = None
    for request, row in zip(state.pending.in_order(), new_rows, strict=False):
        cell = cell or state.suspects.cell_of(request)
        if request.num_in_flight or cell is not state.suspects.cell_of(request):
            return
        admission = Admission(request, (row,), 0, (0,) * groups, (nothing,) * groups)
        if batch.tokens_left:
            if not batch.admit(admission, len(request.token_ids), request.max_total_tokens):
                return
            continue
        pages = [-(-request.max_total_tokens // state.geometry.page_size)] * groups
        if not batch.room.fits(pages):
            return
        batch.room.take(pages)
        batch.admissions.append(admission)
