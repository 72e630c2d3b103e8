"""How many tokens a request drafts, by what became of its last drafts.

A draft token that is rejected costs the computation of a token, and a row that drafts is not
planned ahead. So a draft is as long as the last one promises: twice as long after one that was
right to its end, else what was right of it and one more. It is never longer than the passage that
suggests it. A request whose draft was wrong from the start pauses, each time for longer, and then
tries a single token: on a text that repeats nothing, this bounds the cost.

Pure: drafts follow from the request's tokens and counts alone. So preemptions and lost workers
change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from scheduler_svc.core.prompt_lookup import PromptLookup

if TYPE_CHECKING:
    from scheduler_svc.core.request import Request

Propose = Callable[["Request"], Sequence[int]]  # tokens that may follow a request's known ones

FIRST_LENGTH: Final = 3  # of a draft
FIRST_PAUSE: Final = 4  # output tokens
LONGEST_PAUSE: Final = 64


class Drafter:
    """The drafts of one request."""

    def __init__(self) -> None:
        self._lookup = PromptLookup()
        self._length = FIRST_LENGTH
        self._pause = FIRST_PAUSE
        self._resumes_at = 0  # tokens of the text
        self._num_drafted = 0  # draft tokens verified, and accepted, before the last draft
        self._num_accepted = 0

    def draft(self, request: Request) -> list[int]:
        """Up to `request.speculate` tokens that may follow its known ones."""
        self._learn(request)
        if len(request.token_ids) < self._resumes_at:
            return []
        return self._lookup.guess(request.token_ids, min(self._length, request.speculate))

    def _learn(self, request: Request) -> None:
        drafted = request.num_drafted - self._num_drafted
        accepted = request.num_accepted - self._num_accepted
        self._num_drafted, self._num_accepted = request.num_drafted, request.num_accepted
        if not drafted:
            return
        if accepted == drafted:
            self._length = min(2 * max(self._length, drafted), request.speculate)
            self._pause = FIRST_PAUSE
        elif accepted:
            self._length = accepted + 1
        else:
            self._length = 1
            self._resumes_at = len(request.token_ids) + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)


def propose(request: Request) -> list[int]:
    """The request's drafts from its own text."""
    if request.drafter is None:
        request.drafter = Drafter()
    return request.drafter.draft(request)
