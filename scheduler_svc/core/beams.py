"""A beam search: which continuations of its beams go on, which are answers, and when it ends.

The rules are those of transformers' `generate(num_beams=...)` (GenerationMixin._beam_search,
version 5), in float32 as there. A step extends each running beam by its most probable tokens. Of
all continuations, ranked by the sum of their log probabilities:

- those that end (by a stop token, or by length) are hypotheses if they are among the first `width`.
  A hypothesis' score is its sum / length ** length_penalty, where the length counts generated
  tokens, a stop token included; the best `width` hypotheses are kept;
- the first `width` of the others are the next beams.

With `width` hypotheses the search ends at once if early_stopping is set, else when the best beam,
scored at its present length, beats none of them. It always ends by length.

transformers keeps (1 + number of stop tokens) * width continuations of all beams together; the
first width + number of stop tokens of each beam contain all of them that can matter. A token of
log probability -inf (banned) continues nothing here; there it does, if nothing else is left.

Pure: knows tokens and log probabilities, no rows and no memory (lock_step.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import numpy as np

from protos.plan import Float32, Int32
from scheduler_svc.core.request import BeamSearch, FinishReason, Request, Sampling, TokenScore

NO_SCORE: Final = -1e9  # of an answer for which there is no hypothesis; as in transformers
ZERO: Final = np.float32(0)


@dataclass(slots=True, eq=False)
class Beam:
    """A beginning of an answer that goes on."""

    token_ids: list[int] = field(default_factory=list)  # output tokens
    scores: list[TokenScore] = field(default_factory=list)  # of these, if asked for
    total: np.float32 = ZERO  # sum of their log probabilities


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """An answer that has ended."""

    token_ids: list[int]
    scores: list[TokenScore]
    score: float
    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The most probable next tokens of a beam, falling; log probabilities behind penalties."""

    token_ids: Int32  # [k]
    logprobs: Float32  # [k]


class Search:
    """The beams and hypotheses of one request."""

    def __init__(self, settings: BeamSearch, sampling: Sampling, max_tokens: int) -> None:
        self.settings = settings
        self.beams = [Beam()]  # best first; at most `width`
        self.hypotheses: list[Hypothesis] = []  # best first; at most `width`
        self.has_ended = False
        self._max_tokens = max_tokens
        self._stops = sampling.stop_token_ids
        self._num_shown = sampling.logprobs  # candidates shown with each token's score

    @property
    def num_candidates(self) -> int:
        """Candidates of each beam that `advance` needs."""
        count = max(self.settings.width + len(self._stops), self._num_shown or 0)
        return min(count, self.settings.vocab_size)

    def advance(self, candidates: Sequence[Candidates]) -> list[int]:
        """Extends the beams by the candidates of each. Returns which of the old beams each new one
        continues; none if the search has ended."""
        width, old = self.settings.width, self.beams
        length = len(old[0].token_ids) + 1
        sizes = [len(some.token_ids) for some in candidates]
        beam_of = np.repeat(np.arange(len(old)), sizes)
        place_of = np.concatenate([np.arange(size) for size in sizes])
        totals = np.concatenate(
            [some.logprobs + beam.total for some, beam in zip(candidates, old, strict=True)]
        )
        parents: list[int] = []
        self.beams = []
        for rank, choice in enumerate(np.argsort(-totals, kind="stable").tolist()):
            if totals[choice] == -np.inf or (rank >= width and len(self.beams) == width):
                break
            parent, place = int(beam_of[choice]), int(place_of[choice])
            token_id = int(candidates[parent].token_ids[place])
            is_stop = token_id in self._stops
            if is_stop or length == self._max_tokens:
                if rank < width:
                    beam = self._extended(old[parent], candidates[parent], place, totals[choice])
                    self._add(beam, token_id if is_stop else None)
            elif len(self.beams) < width:
                parents.append(parent)
                self.beams.append(
                    self._extended(old[parent], candidates[parent], place, totals[choice])
                )
        self.has_ended = not self.beams or self._is_decided(length)
        if self.has_ended:
            self.beams, parents = [], []
        return parents

    def answers(self) -> list[Hypothesis]:
        """The best hypotheses, best first; empty ones in place of those that there are not, as the
        vocabulary or a ban may leave too few."""
        wanted = self.settings.num_answers
        missing = Hypothesis([], [], NO_SCORE, FinishReason.STOP)
        return (self.hypotheses + [missing] * wanted)[:wanted]

    def num_common(self) -> int:
        """Leading output tokens that all beams have in common."""
        lowest, highest = min(b.token_ids for b in self.beams), max(b.token_ids for b in self.beams)
        pairs = zip(lowest, highest, strict=True)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), len(lowest))

    def _extended(self, beam: Beam, some: Candidates, place: int, total: np.float32) -> Beam:
        token_id = int(some.token_ids[place])
        scores = beam.scores
        if self._num_shown is not None:
            pairs = zip(some.token_ids.tolist(), some.logprobs.tolist(), strict=True)
            top = tuple(islice(pairs, self._num_shown))
            score = TokenScore(token_id, float(some.logprobs[place]), place + 1, top)
            scores = [*beam.scores, score]
        return Beam([*beam.token_ids, token_id], scores, total)

    def _add(self, beam: Beam, stop_token_id: int | None) -> None:
        score = _scored(beam.total, len(beam.token_ids), self.settings.length_penalty)
        reason = FinishReason.LENGTH if stop_token_id is None else FinishReason.STOP
        self.hypotheses.append(
            Hypothesis(beam.token_ids, beam.scores, float(score), reason, stop_token_id)
        )
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)  # stable: the older first
        del self.hypotheses[self.settings.width :]

    def _is_decided(self, length: int) -> bool:
        """Whether no beam may add a hypothesis any more."""
        if len(self.hypotheses) < self.settings.width:
            return False
        best_possible = _scored(self.beams[0].total, length, self.settings.length_penalty)
        return self.settings.early_stopping or bool(best_possible <= self.hypotheses[-1].score)


def _scored(total: np.float32, length: int, length_penalty: float) -> np.float32:
    """A sum of log probabilities with the length penalty."""
    with np.errstate(over="ignore", divide="ignore"):
        return np.float32(total / np.float32(np.float64(length) ** length_penalty))


class BeamGroup:
    """The requests that hold the beams of a search, `width` of them, each with a row or none.

    One of them, the leader, waits in the queue for all, with the tokens that all beams have in
    common; the others are its siblings, forked off when these have been computed.
    """

    def __init__(self, search: Search, members: list[Request]) -> None:
        self.search = search
        self.members = members  # by index
        self.leader = members[0]
        self.holders: list[Request] = []  # of the search's beams, in their order; once forked
        self.arrived: dict[int, Candidates] = {}  # index → candidates of the beam it holds

    def arrive(self, member: Request, score: TokenScore) -> None:
        """Keeps the candidates that a step has found for a member's beam."""
        token_ids, logprobs = zip(*score.top, strict=True)
        self.arrived[member.index] = Candidates(
            np.array(token_ids, np.int32), np.array(logprobs, np.float32)
        )

    @property
    def is_complete(self) -> bool:
        """Whether the candidates of all beams have come."""
        return 0 < len(self.holders) == len(self.arrived)

    def advance(self) -> list[Request]:
        """Takes the search one token further. Returns the holders of the new beams' parents."""
        candidates = [self.arrived[holder.index] for holder in self.holders]
        self.arrived.clear()
        return [self.holders[parent] for parent in self.search.advance(candidates)]

    def tokens_in_common(self) -> list[int]:
        """The prompt, and what all beams have in common behind it."""
        leader, common = self.leader, self.search.num_common()
        prompt = leader.token_ids[: leader.num_prompt_tokens]
        return prompt + self.search.beams[0].token_ids[:common]


def units(requests: Iterable[Request]) -> list[list[Request]]:
    """The requests, those together that are preempted together: the beams of a search."""
    units: dict[Request, list[Request]] = {}
    for request in requests:
        first = request if request.beams is None else request.beams.members[0]
        units.setdefault(first, []).append(request)
    return list(units.values())
