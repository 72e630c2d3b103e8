"""The baseline: padded batches as `generate` computes them, with our own kernels.

A batch is admitted whole when nothing else runs: as many waiting requests as rows and blocks allow,
with pages for prompt + max_tokens reserved. Its prompts are computed first, in as many steps as the
token budget requires; then every step computes every row, ended ones included, until the last has
ended. So it wastes what padded generation wastes, and nothing else differs from the other policies.
Requests with siblings are refused, as their blocks cannot be reserved, and no drafts are verified.
All else that a request may ask for works: penalties, biases, grammars, log probabilities.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scheduler_svc.core.request import Request
from scheduler_svc.core.state import State
from scheduler_svc.core.step.batch import Batch
from scheduler_svc.core.step.head_start import alone


class StaticState(State):
    """Rows are released together, and pages are reserved for all of their tokens."""

    holds_ended = True

    def release_ended(self, requests: Sequence[Request]) -> None:
        """Releases the batch, once all of it has ended and no plan is in flight."""
        if self.rows.is_finished[self.rows.in_use()].all() and not self.in_flight:
            for request in list(self.rows.running.values()):
                self.release(request)


def fill_static_batch(batch: Batch) -> None:
    """Adds the next step of the running batch, or admits a new one; no cache budget applies."""
    batch.pages_left = sys.maxsize
    rows = batch.state.rows
    in_use = rows.in_use()
    if not len(in_use):
        _admit_batch(batch)
        return
    to_compute = rows.to_compute(in_use) > 0
    prefilling = in_use[~rows.is_decoding[in_use] & to_compute]
    for row in prefilling.tolist():
        batch.add_row(row, int(rows.known[row] - rows.computed[row]), int(rows.limit[row]))
    if not len(prefilling) and to_compute.any():
        # Ended rows recompute their last token. A row sure to end by length with the plans in
        # flight does so only after its result: until then that token is unknown. One aborted before
        # any step computed it has no last token.
        has_ended = rows.is_finished[in_use] & (rows.computed[in_use] > 0)
        rows.computed[in_use[has_ended]] -= 1
        batch.add_decoding(in_use[to_compute | has_ended])


def _admit_batch(batch: Batch) -> None:
    """Admits all that fit. Prompts beyond this step's tokens and logits get their blocks now, and
    are computed by the next steps."""
    state, memory = batch.state, batch.state.memory
    cell = None
    for request in state.pending.in_order():
        if not batch.free_rows:
            return
        cell = cell or state.suspects.cell_of(request)
        if request.num_in_flight or cell is not state.suspects.cell_of(request):
            return
        candidate = alone(state, request)
        if batch.tokens_left and batch.has_logits(request):
            if not batch.admit(candidate, len(request.token_ids), request.max_total_tokens):
                return
            continue
        pages = -(-request.max_total_tokens // memory.page_size)
        if not memory.device.take([pages] * len(memory.groups)):
            return
        batch.assign(candidate)
