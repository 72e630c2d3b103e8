"""A request as the core knows it: what was asked, the tokens known so far, its state.

While it holds a row, whatever every step needs of it, the two cursors above all, lives in `Rows`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from protos.plan import Int32
from protos.sampling import SamplerParameters
from scheduler_svc.core.biases import Biases
from scheduler_svc.core.drafting import Drafter
from scheduler_svc.core.history import History

if TYPE_CHECKING:
    from scheduler_svc.core.beams import BeamGroup

NO_ROW: Final = -1


class RequestState(enum.StrEnum):
    """Where a request stands: see state.py for the transitions."""

    PENDING = "PENDING"  # holds no row and no blocks
    PREFILLING = "PREFILLING"  # part of its known tokens has no KV yet
    DECODING = "DECODING"  # all known tokens are scheduled; each step samples one more
    FINISHED = "FINISHED"  # a plan in flight may still name it


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Sampling(SamplerParameters):
    """How to choose tokens: defaults resolved, values validated by the API."""

    seed: int = 0  # 0 <= seed < 2^63
    stop_token_ids: frozenset[int] = frozenset()  # with EOS, unless it is ignored
    min_tokens: int = 0  # stop tokens are banned before so many output tokens
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit), by id
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences never completed
    logprobs: int | None = None  # candidates beside each output token; None = no log probabilities

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty has an effect."""
        penalties = self.repetition_penalty, self.frequency_penalty, self.presence_penalty
        return penalties != (1.0, 0.0, 0.0)

    @property
    def has_biases(self) -> bool:
        """Whether anything is ever added to the logits."""
        return bool(self.logit_bias or self.bad_words or (self.min_tokens and self.stop_token_ids))


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """A search for the most probable answers, as transformers' generate(num_beams) makes it."""

    width: int  # at least 2
    num_answers: int = 1  # best hypotheses that are wanted, at most `width`
    length_penalty: float = 1.0
    early_stopping: bool = False
    vocab_size: int = 1 << 31  # bounds the candidates


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as the API accepted it."""

    request_id: str
    prompt_token_ids: Sequence[int]  # at least one
    max_tokens: int  # 0 = compute the prompt, sample nothing
    sampling: Sampling = field(default_factory=Sampling)
    priority: int = 0  # lower first
    cache_salt: str = ""
    n: int = 1  # siblings that continue the same prompt
    speculate: int = 0  # most draft tokens that a step verifies
    # generated before, if an answer is resumed (n is 1 then): at most max_tokens. They are output
    # tokens like all later ones
    output_token_ids: Sequence[int] = ()
    index: int = 0  # of the (first) sibling: its random numbers depend on it
    # candidates beside each prompt token; of a resumed answer, the prompt was scored before
    prompt_logprobs: int | None = None
    is_constrained: bool = False  # a grammar's mask comes for each sample
    beams: BeamSearch | None = None

    @property
    def num_beams(self) -> int:
        """Beams of its search; 1 = none."""
        return 1 if self.beams is None else self.beams.width

    @property
    def num_answers(self) -> int:
        """Answers that its sender gets."""
        return self.n if self.beams is None else self.beams.num_answers


class TokenScore(NamedTuple):
    """The log probability of a token, and of the most probable ones in its place."""

    token_id: int
    logprob: float
    rank: int  # 1 = the most probable
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), falling


@dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """Blocks that a request can share: tables from first_pages on. A block whose stamp has changed
    may have other content by now (allocators.py)."""

    num_pages: int
    num_run: int  # pages in all full-attention groups; windows may allow fewer
    first_pages: tuple[int, ...]  # [G]
    blocks: tuple[Int32, ...]  # [G]
    stamps: tuple[npt.NDArray[np.int64], ...]  # [G]


@dataclass(slots=True, eq=False)
class Swapped:
    """An offloaded request's tables in the swap pool."""

    num_tokens: int  # tokens with KV
    first_pages: tuple[int, ...]  # [G]
    blocks: tuple[Int32, ...]  # [G] swap blocks
    found: Hit | None = None  # blocks still cached at the first look-up; -1 = none


@dataclass(slots=True, eq=False)
class Request:
    """A live request, or one of its siblings. Arrival is a ticket number, never a wall clock."""

    request_id: str
    ticket: int
    token_ids: list[int]  # prompt, then returned samples; no placeholders
    num_prompt_tokens: int
    max_total_tokens: int  # prompt + max_tokens
    sampling: Sampling
    priority: int = 0
    cache_salt: str = ""
    speculate: int = 0
    index: int = 0  # among its siblings
    siblings: list[Request] = field(default_factory=list)  # to fork off when the prompt is computed

    state: RequestState = RequestState.PENDING
    row: int = NO_ROW
    num_in_flight: int = 0  # plans that name it, while it has no row (Rows.num_in_flight)
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the prompt: prefix-cache hit of its first admission
    was_admitted: bool = False
    may_match: bool = True  # may use the prefix cache
    was_wedged: bool = False  # reset once to end a wedge (wedge.py)
    names: list[bytes] = field(default_factory=list)  # of its full blocks, so far
    awaited: bytes | None = None  # name of the last block that another is filling for it
    hit: Hit | None = None  # last result of the prefix-cache search
    swapped: Swapped | None = None  # set while it is offloaded
    drafts: tuple[int, ...] = ()  # draft tokens behind token_ids, to verify
    drafter: Drafter | None = None
    num_drafted: int = 0  # draft tokens verified so far
    num_accepted: int = 0  # of these, those that were right
    prompt_logprobs: int | None = None  # candidates beside each prompt token
    scores: list[TokenScore] = field(default_factory=list)  # of output tokens, if asked for
    prompt_scores: list[TokenScore] = field(default_factory=list)  # of the prompt from token 1 on
    is_constrained: bool = False  # a grammar's mask comes for each sample
    history: History | None = None  # made by the first sample that has penalties
    biases: Biases | None = None  # made by the first sample that has any
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it, if one did
    beams: BeamGroup | None = None  # of a beam search: shared with all its siblings
    beam_score: float | None = None  # of an answer that a beam search found
    first_tokens: Int32 = field(  # [n] those that it was submitted with
        default_factory=lambda: np.zeros(0, np.int32)
    )

    @property
    def name(self) -> str:
        """For messages and logs."""
        return f"{self.request_id}[{self.index}]" if self.index else self.request_id

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_unscored(self) -> int:
        """Prompt tokens whose log probability is asked for and has not returned."""
        if self.prompt_logprobs is None:
            return 0
        return self.num_prompt_tokens - 1 - len(self.prompt_scores)
