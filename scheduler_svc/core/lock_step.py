"""The beams of a search in lock-step: forked together, and advanced once all candidates have come.

A beam whose candidates have come has nothing to compute until the others' have; then the group
advances. A beam's first continuation stays in its row. Each further one takes the row of a beam
that nothing continues, or one not used yet, and shares its parent's blocks: so an exchange of beams
copies no KV but partial last pages, on write (step/batch.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from scheduler_svc.core.beams import Beam, BeamGroup
from scheduler_svc.core.request import FinishReason, Request, RequestState

if TYPE_CHECKING:
    from scheduler_svc.core.state import State

_COPIED: Final = ("computed", "goal", "is_decoding", "is_tainted", "published")  # of a parent's row


def fork_beams(state: State, leader: Request) -> bool:
    """Gives the leader's siblings their beams, as a step completes what all have in common. Returns
    whether the leader's beam is the only one, and complete: then the step samples it."""
    group, rows = leader.beams, state.rows
    assert group is not None
    beams = group.search.beams
    others = leader.siblings[: len(beams) - 1]
    leader.siblings = []
    rows.will_fork[leader.row] = False
    group.holders = [leader, *others]
    if len(beams) == 1:
        return True
    for holder, beam in zip(group.holders, beams, strict=True):
        if holder is not leader:
            _share(state, leader, holder)
            holder.state = RequestState.PREFILLING
        _set_tokens(holder, beam)
        _count_tokens(state, holder)
    return False


def advance_beams(state: State, group: BeamGroup) -> list[Request]:
    """Takes a group whose candidates have all come one token further. Returns the requests that
    have answers, once the search has ended."""
    parents = group.advance()
    if group.search.has_ended:
        return _finish(state, group)
    beams = group.search.beams
    idle = [member for member in group.members if member not in parents]
    holders: list[Request] = []
    for parent in parents:
        if parent in holders:
            holder = idle.pop(0)
            _let_go(state, holder)
            _share(state, parent, holder)
            holder.state = RequestState.DECODING
        else:
            holder = parent
        holders.append(holder)
    for holder in idle:
        _let_go(state, holder)
    group.holders = holders
    for holder, parent, beam in zip(holders, parents, beams, strict=True):
        if holder is parent:
            holder.token_ids.append(beam.token_ids[-1])
        else:
            _set_tokens(holder, beam)
        _count_tokens(state, holder)
    return []


def preempt_beams(state: State, group: BeamGroup) -> None:
    """Preempts all beams of a search. What they have in common may go to the swap pool but for its
    last token: the leader computes that one again, and then forks the others off."""
    is_forked = gather_beams(state, group)
    leader, kept = group.leader, len(group.leader.token_ids) - 1
    if is_forked and kept and state.memory.holds_window(leader.row, kept):
        state.memory.release_tail(leader.row, kept)
        leader.swapped = state.memory.swap_out(leader, kept)
    if leader.swapped is None:
        state.counters.soft_resets += 1
    else:
        state.counters.offloads += 1
    state.requeue(leader)
    for member in group.members:
        member.num_preemptions += 1


def gather_beams(state: State, group: BeamGroup) -> bool:
    """Takes their rows and blocks from all members of a forked group but one: the leader, left with
    the tokens that all beams have in common. The others are its siblings again. False if the group
    has not forked."""
    if not group.holders:
        return False
    leader = group.leader = group.holders[0]
    state.memory.prefix_cache.break_promises(leader)
    leader.token_ids = group.tokens_in_common()
    leader.history = None
    del leader.names[len(leader.token_ids) // state.memory.page_size :]
    leader.siblings = [member for member in group.members if member is not leader]
    for member in leader.siblings:
        state.release(member)
        member.state = RequestState.PENDING
    group.holders = []
    group.arrived.clear()
    return True


def _share(state: State, parent: Request, holder: Request) -> None:
    """Lets the row of a member that holds no beam continue what its parent's row has computed."""
    rows, row = state.rows, holder.row
    rows.awaits_fork[row] = False
    for name in _COPIED:
        column = getattr(rows, name)
        column[row] = column[parent.row]
    holder.names = list(parent.names)
    state.memory.fork(parent.row, row, int(rows.computed[row]))


def _let_go(state: State, holder: Request) -> None:
    """Takes a member's beam from it, if it has one: its row holds nothing."""
    rows, row = state.rows, holder.row
    if rows.awaits_fork[row]:
        return
    state.memory.prefix_cache.break_promises(holder)
    state.memory.release_row(row)
    rows.computed[row] = rows.published[row] = 0
    rows.is_decoding[row] = False
    rows.await_fork(row)


def _set_tokens(holder: Request, beam: Beam) -> None:
    holder.token_ids = holder.token_ids[: holder.num_prompt_tokens] + beam.token_ids
    holder.history = None  # what penalties see is counted anew


def _count_tokens(state: State, holder: Request) -> None:
    state.rows.known[holder.row] = len(holder.token_ids)
    state.rows.last_token[holder.row] = holder.token_ids[-1]


def _finish(state: State, group: BeamGroup) -> list[Request]:
    """Ends all members; the first ones get the answers."""
    answers = group.search.answers()
    answered = group.members[: len(answers)]
    for member, answer in zip(answered, answers, strict=True):
        member.token_ids = member.token_ids[: member.num_prompt_tokens] + answer.token_ids
        member.scores = answer.scores
        member.beam_score = answer.score
        state.finish_member(member, answer.reason, answer.stop_token_id)
    for member in group.members[len(answers) :]:
        state.finish_member(member, FinishReason.STOP)
    return answered
