"""Admits waiting requests to a batch, and decides who has to keep waiting."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from scheduler_svc.core.request import Request
from scheduler_svc.core.step.batch import Admission, Batch
from scheduler_svc.core.step.head_start import admission, alone
from scheduler_svc.core.step.overtaking import stays

LOOK_AHEAD: Final = 4  # waiting requests looked at per step, times the number of rows


def admit_waiting(batch: Batch, requests: Iterable[Request], favoured: Request | None) -> None:
    """As many of them as there is room for, in this order; the favoured one joins whatever the
    margin."""
    state = batch.state
    if batch.stalled or batch.left_out or not len(state.pending):
        return  # first those that run
    has_margin = batch.has_margin()
    waiting = (request for request in requests if request not in batch.victims)
    admitted = {admission.request.ticket for admission in batch.admissions}
    for request in islice(waiting, LOOK_AHEAD * state.rows.num_rows):
        num_rows = 1 + len(request.siblings)
        if not (batch.tokens_left and batch.requests_left) or len(batch.free_rows) < num_rows:
            return
        if request.ticket in admitted:
            continue
        is_free = batch.is_empty or request is favoured
        if not (has_margin or is_free):
            return
        if request.num_in_flight:
            return  # preempted while a plan names it: a token may still come back
        if batch.cell not in (None, state.suspects.cell_of(request)):
            return  # its turn comes; to overtake it could starve it
        begins = admission(state, request)
        if begins is None:
            continue  # somebody is computing what it needs next
        if not (is_free or stays(batch, begins)) or not _admit(batch, begins):
            return  # whoever waits behind must not overtake: it could starve this one
        has_margin = batch.has_margin()


def _admit(batch: Batch, begins: Admission) -> bool:
    num_tokens = len(begins.request.token_ids)
    if batch.admit(begins, num_tokens - begins.num_computed):
        return True
    if not batch.is_empty or batch.state.rows.running:
        return False
    # alone it always fits, but for cached blocks that lie scattered over too many chunks
    begins = alone(batch.state, begins.request)
    return batch.admit(begins, num_tokens - begins.num_computed)
