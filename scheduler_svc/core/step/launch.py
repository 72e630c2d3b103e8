"""Completes a step: picks the blocks that were taken for it, and advances the cursors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields
from typing import Final

import numpy as np
import numpy.typing as npt

from protos.plan import NO_CANDIDATES, Int32
from scheduler_svc.core.lock_step import fork_beams
from scheduler_svc.core.reports import NOTHING, Reports, ScoredPrompt
from scheduler_svc.core.request import Request, RequestState
from scheduler_svc.core.state import InFlight, State
from scheduler_svc.core.step.batch import Batch, Part

_NO_SAMPLES: Final = np.zeros(0, np.intp)


def launch(batch: Batch) -> InFlight | None:
    """Puts the batch in flight; None, and nothing changes, if it computes nothing."""
    if batch.is_empty:
        return None
    state = batch.state
    rows = state.rows
    step = _whole(batch.parts)
    computed_rows, counts = step.rows, step.num_new_tokens
    for admission in batch.admissions:
        state.pending.remove(admission.request)
    freed_swap = _draw(batch, step)

    ends = rows.computed[computed_rows] + counts
    rows.computed[computed_rows] = ends
    num_known = rows.known[computed_rows] + rows.outstanding[computed_rows]
    reaches_end, has_all = ends >= num_known, num_known >= rows.limit[computed_rows]
    new_tenants = [admission.request.row for admission in batch.admissions]
    is_sampled = reaches_end & ~has_all
    if rows.num_beams:
        for place in (is_sampled & _forks_beams(state, computed_rows)).nonzero()[0].tolist():
            leader = rows.running[int(computed_rows[place])]
            new_tenants += [sibling.row for sibling in leader.siblings]
            is_sampled[place] = fork_beams(state, leader)
    sampled = is_sampled.nonzero()[0]
    sample_ends = ends[sampled]
    sampled_rows = computed_rows[sampled]
    rows.outstanding[sampled_rows] += ~rows.is_beam[sampled_rows]
    for row in sampled_rows[~rows.is_decoding[sampled_rows]].tolist():
        rows.is_decoding[row] = True
        rows.running[row].state = RequestState.DECODING
    named, requests = computed_rows, rows.tenants(computed_rows)
    drafts: dict[int, tuple[int, ...]] = {}
    if rows.num_speculating:
        num_drafts = ends[sampled] - num_known[sampled]
        pairs = zip(sampled.tolist(), num_drafts.tolist(), strict=True)
        drafts = {place: requests[place].drafts[:count] for place, count in pairs if count}
        rows.outstanding[sampled_rows] += num_drafts
        rows.num_drafts[sampled_rows] = num_drafts
        rows.awaits_drafts[sampled_rows] = False
        num_samples = num_drafts + 1
        sampled, sample_ends = sampled.repeat(num_samples), sample_ends.repeat(num_samples)
        # counts down to 0 within each row
        sample_ends -= num_samples.cumsum().repeat(num_samples) - np.arange(1, len(sampled) + 1)
    sampled_for = sampled
    parents = sampled[rows.will_fork[computed_rows[sampled]]].tolist()
    if parents:
        families = [_fork(state, requests[place]) for place in parents]
        siblings = list(itertools.chain.from_iterable(families))
        places = np.repeat(parents, [len(family) for family in families])
        sibling_rows = [sibling.row for sibling in siblings]
        new_tenants += sibling_rows
        sampled = np.concatenate([sampled, places])
        sample_ends = np.concatenate([sample_ends, ends[places]])
        sampled_for = np.concatenate([sampled_for, np.arange(len(siblings)) + len(computed_rows)])
        named = np.concatenate([computed_rows, np.array(sibling_rows, np.int32)])
        requests = requests + siblings
    reports, constrained = NOTHING, _NO_SAMPLES
    if rows.num_special:
        samples = named[sampled_for]
        candidates = rows.num_candidates[samples]
        constrained = rows.is_constrained[samples].nonzero()[0]
        scored = _scored_prompts(state, step, requests)
        if scored or (candidates != NO_CANDIDATES).any():
            reports = Reports(candidates, scored, rows.is_beam[samples])
    rows.num_in_flight[named] += 1
    in_flight = InFlight(
        step_id=state.next_step_id,
        rows=computed_rows,
        num_new_tokens=counts,
        ends=ends,
        named=named,
        generation=rows.generation[named],
        requests=requests,
        sampled=sampled,
        sampled_for=sampled_for,
        sample_ends=sample_ends,
        drafts=drafts,
        unsampled=(reaches_end & has_all).nonzero()[0].tolist(),
        reports=reports,
        constrained=constrained,
        admitted=[admission.request for admission in batch.admissions],
        new_tenants=np.array(new_tenants, np.int32),
        transfers=state.memory.take_transfers(),
        freed_swap=freed_swap,
    )
    state.left_out = _left_out(batch)
    state.next_step_id += 1
    state.in_flight.append(in_flight)
    state.suspects.end_turn(requests[0])
    return in_flight


def _whole(parts: list[Part]) -> Part:
    """The parts as one."""
    if len(parts) == 1:
        return parts[0]
    names = [field.name for field in fields(Part)]
    arrays = [[getattr(part, name) for part in parts] for name in names]
    return Part(*(np.concatenate(array, axis=-1) for array in arrays))


def _draw(batch: Batch, step: Part) -> list[Sequence[Int32]]:
    """Picks the blocks of restored pages, copied tails and new pages. Returns tables of swap blocks
    [G] that are free after the step."""
    state, memory = batch.state, batch.state.memory
    restored = [a for a in batch.admissions if a.swapped is not None]
    needed = step.new_blocks.sum(axis=1) + step.tail_copies.sum(axis=1)
    for admission in restored:
        needed += admission.num_restored
    memory.device.begin_drawing(needed.tolist())
    freed_swap: list[Sequence[Int32]] = []
    for admission in restored:
        assert admission.swapped is not None
        memory.swap_in(admission.request.row, admission.swapped)
        freed_swap.append(admission.swapped.blocks)
        admission.request.swapped = None
        state.counters.restores += 1
    for group in range(len(memory.groups)):
        for row in step.rows[step.tail_copies[group]].tolist():
            memory.copy_tail(group, row, int(state.rows.computed[row]) // memory.page_size)
        grows = step.new_blocks[group].nonzero()[0]
        if len(grows):
            counts = step.new_blocks[group, grows]
            blocks = memory.device.draw(group, int(counts.sum()))
            memory.tables.extend(group, step.rows[grows], counts, blocks)
    memory.device.end_drawing()
    return freed_swap


def _scored_prompts(state: State, step: Part, requests: list[Request]) -> list[ScoredPrompt]:
    """The pieces of prompts that the step scores: what it computes of those not scored yet."""
    rows, scored = state.rows, []
    for place in rows.scores_prompt[step.rows].nonzero()[0].tolist():
        request = requests[place]
        computed = int(rows.computed[step.rows[place]])
        # scores of tokens before are in flight, unless they have returned
        begin = max(computed - int(step.num_new_tokens[place]), len(request.prompt_scores)) + 1
        end = min(computed + 1, request.num_prompt_tokens)
        if begin < end and request.state is not RequestState.FINISHED:
            scored.append(ScoredPrompt(place, begin, end, request.prompt_logprobs or 0))
    return scored


def _forks_beams(state: State, rows: Int32) -> npt.NDArray[np.bool_]:
    """Whether rows are to fork off the beams of a search when their tokens are computed. [R]"""
    forks: npt.NDArray[np.bool_] = state.rows.will_fork[rows] & state.rows.is_beam[rows]
    return forks


def _fork(state: State, parent: Request) -> list[Request]:
    """Forks off the siblings, which share the blocks of the prompt that this step completes."""
    rows, row = state.rows, parent.row
    siblings, parent.siblings = parent.siblings, []
    rows.will_fork[row] = False
    for sibling in siblings:
        rows.awaits_fork[sibling.row] = False
        sibling.state = RequestState.DECODING
        for name in ("computed", "outstanding", "goal", "is_decoding", "published"):
            getattr(rows, name)[sibling.row] = getattr(rows, name)[row]
        state.memory.fork(row, sibling.row, int(rows.computed[row]))
    return siblings


def _left_out(batch: Batch) -> tuple[Request, ...]:
    """Running requests beyond the cache budget; those of other cells still wait for their turn."""
    state, left_out = batch.state, list(batch.left_out)
    if batch.cell is not None:
        cell_of = state.suspects.cell_of
        left_out += [r for r in state.left_out if cell_of(r) is not batch.cell]
    return tuple(left_out)
