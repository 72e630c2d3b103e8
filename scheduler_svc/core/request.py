"""A request as the core knows it: what was asked, what is known so far, where it stands.

While a request holds a row, its two cursors (what has been scheduled, what has come back) and
all else that every step needs live in `Rows`, as arrays; here is what a step does not touch.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from protos.plan import Int32
from protos.sampling import SamplerParameters

NO_ROW: Final = -1


class RequestState(enum.StrEnum):
    PENDING = "PENDING"  # holds no row and no blocks
    PREFILLING = "PREFILLING"  # part of its known tokens has no KV yet
    DECODING = "DECODING"  # every known token is scheduled; each step samples one more
    FINISHED = "FINISHED"  # ended, perhaps still named by a plan in flight


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Sampling(SamplerParameters):
    """How to choose tokens; every value is resolved and valid (the API checks them)."""

    seed: int = 0  # 0 <= seed < 2^63
    stop_token_ids: frozenset[int] = frozenset()  # EOS included, unless it is to be ignored


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What the API accepted, before admission by the core."""

    request_id: str
    prompt_token_ids: Sequence[int]  # at least one
    max_tokens: int  # 0 = compute the prompt, sample nothing
    sampling: Sampling = field(default_factory=Sampling)
    priority: int = 0  # lower first
    cache_salt: str = ""
    n: int = 1  # siblings that continue the same prompt
    speculate: int = 0  # most guessed tokens that a step verifies


@dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """Blocks that a request can share: for each group its table from first_pages on.

    A block whose stamp has changed may hold something else by now (allocators.py).
    """

    num_pages: int
    num_run: int  # pages that all full-attention groups have; windows may allow fewer
    first_pages: tuple[int, ...]  # [G]
    blocks: tuple[Int32, ...]  # [G]
    stamps: tuple[npt.NDArray[np.int64], ...]  # [G] of the blocks


@dataclass(slots=True, eq=False)
class Swapped:
    """Where an offloaded request's KV is: for each cache group, its table in the swap pool."""

    num_tokens: int  # whose KV it is
    first_pages: tuple[int, ...]  # [G]
    blocks: tuple[Int32, ...]  # [G] swap blocks
    found: Hit | None = None  # what the prefix cache still had of it; -1 where nothing


@dataclass(slots=True, eq=False)
class Request:
    """A live request, or one of its siblings. Arrival is a ticket number, never a wall clock."""

    request_id: str
    ticket: int
    token_ids: list[int]  # prompt, then what has come back; never a placeholder
    num_prompt_tokens: int
    max_total_tokens: int  # prompt + max_tokens
    sampling: Sampling
    priority: int = 0
    cache_salt: str = ""
    speculate: int = 0
    index: int = 0  # among its siblings
    siblings: list[Request] = field(default_factory=list)  # to be forked off when it samples

    state: RequestState = RequestState.PENDING
    row: int = NO_ROW
    num_in_flight: int = 0  # plans that name it and have not returned; rows have it while running
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # found in the prefix cache at its first admission
    was_admitted: bool = False
    may_match: bool = True  # the prefix cache
    was_wedged: bool = False  # nothing could be planned, and that was put down to it
    names: list[bytes] = field(default_factory=list)  # of its full blocks, as far as asked for
    awaited: bytes | None = None  # name of the last block that another is filling for it
    hit: Hit | None = None  # what was found in the prefix cache at the last look
    swapped: Swapped | None = None  # set while it is offloaded
    drafts: tuple[int, ...] = ()  # guesses what follows token_ids, to be verified
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it, if one did
    # [num_prompt_tokens] to compare with others'
    prompt: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def name(self) -> str:
        """For messages and logs."""
        return f"{self.request_id}[{self.index}]" if self.index else self.request_id

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens
