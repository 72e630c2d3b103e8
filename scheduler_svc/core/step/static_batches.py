"""The classic baseline: padded batches, as `generate` computes them, with our own kernels.

A batch is admitted whole, when nothing else runs: as many waiting requests as there are rows and,
with pages for prompt + max_tokens reserved, blocks. Its prompts are computed first, all of them, in
as many steps as the token budget asks for; then every step computes every row, ended ones too,
until the last has ended. So it wastes what padded generation wastes, and nothing else differs
from the other policies. Requests with siblings are refused: their blocks cannot be reserved.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scheduler_svc.core.request import Request
from scheduler_svc.core.state import State
from scheduler_svc.core.step.batch import Batch
from scheduler_svc.core.step.head_start import alone


class StaticState(State):
    """Rows leave together, with pages reserved for all their tokens."""

    holds_ended = True

    def release_ended(self, requests: Sequence[Request]) -> None:
        """Gives back a batch, once all of it has ended and no plan names it."""
        if self.rows.is_finished[self.rows.in_use()].all() and not self.in_flight:
            for request in list(self.rows.running.values()):
                self.release(request)


def fill_static_batch(batch: Batch) -> None:
    """Adds what a static batch computes next; the whole batch, whatever it reads."""
    batch.pages_left = sys.maxsize
    rows = batch.state.rows
    in_use = rows.in_use()
    if not len(in_use):
        _admit_batch(batch)
        return
    prefilling = in_use[~rows.is_decoding[in_use] & ~rows.is_finished[in_use]]
    if len(prefilling):
        for row in prefilling.tolist():
            batch.add_row(row, int(rows.known[row] - rows.computed[row]), int(rows.limit[row]))
        return
    goes_on = rows.to_compute(in_use) > 0
    if goes_on.any():
        # a row that is sure to end by length with the plans in flight is computed on as well,
        # but only once its end has come back: until then its last token is not known; one that
        # was aborted before any step computed it has no last token
        has_ended = rows.is_finished[in_use] & (rows.computed[in_use] > 0)
        rows.computed[in_use[has_ended]] -= 1  # its last token is computed again
        batch.add_decoding(in_use[goes_on | has_ended])


def _admit_batch(batch: Batch) -> None:
    """Gives rows to all that fit; those whose prompts this step has no tokens left for are
    computed by the next steps, which find the blocks that were counted here."""
    state, memory = batch.state, batch.state.memory
    cell = None
    for request in state.pending.in_order():
        if not batch.free_rows:
            return
        cell = cell or state.suspects.cell_of(request)
        if request.num_in_flight or cell is not state.suspects.cell_of(request):
            return
        begins = alone(state, request)
        if batch.tokens_left:
            if not batch.admit(begins, len(request.token_ids), request.max_total_tokens):
                return
            continue
        pages = -(-request.max_total_tokens // memory.page_size)
        if not memory.device.take([pages] * len(memory.groups)):
            return
        batch.assign(begins)
