"""Admits waiting requests to a batch, in order; decides which of them must keep waiting."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from scheduler_svc.core.request import Request
from scheduler_svc.core.step.batch import Batch
from scheduler_svc.core.step.head_start import admission, alone
from scheduler_svc.core.step.overtaking import leaves_reserve

LOOK_AHEAD: Final = 4  # waiting requests examined per step, times the number of rows


def admit_waiting(batch: Batch, requests: Iterable[Request]) -> None:
    """Admits as many of these as there is room for, in this order; the favoured one joins whatever
    the margin."""
    state = batch.state
    if batch.stalled or batch.left_out or not len(state.pending):
        return  # running rows come first
    has_margin = batch.has_margin()
    waiting = (request for request in requests if request not in batch.victims)
    admitted = {admission.request.ticket for admission in batch.admissions}
    for request in islice(waiting, LOOK_AHEAD * state.rows.num_rows):
        num_rows = 1 + len(request.siblings)
        if not (batch.tokens_left and batch.requests_left) or len(batch.free_rows) < num_rows:
            return
        if request.ticket in admitted:
            continue
        ignores_margin = batch.is_empty or request is batch.favoured
        if not (has_margin or ignores_margin):
            return
        if request.num_in_flight or any(sibling.num_in_flight for sibling in request.siblings):
            return  # preempted while a plan names it: a token may still arrive
        if batch.cell not in (None, state.suspects.cell_of(request)):
            return  # to overtake it before its cell's turn could starve it
        candidate = admission(state, request)
        if candidate is None:
            continue  # another request computes the block that it needs next
        if not (ignores_margin or leaves_reserve(batch, candidate)):
            return
        num_tokens = len(request.token_ids)
        if not batch.admit(candidate, num_tokens - candidate.num_computed):
            if not batch.is_empty or state.rows.running:
                return  # to overtake it could starve it
            # alone it always fits, unless the blocks that it shares lie in too many chunks
            candidate = alone(state, request)
            if not batch.admit(candidate, num_tokens - candidate.num_computed):
                return
        has_margin = batch.has_margin()
