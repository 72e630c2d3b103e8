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

from collections.abc import Sequence
from typing import Final

from protos.sampling import MAX_DRAFTS
from scheduler_svc.core.prompt_lookup import PromptLookup

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
        self._num_drafted = 0  # at the last call
        self._num_accepted = 0

    def draft(
        self, token_ids: Sequence[int], most: int, num_drafted: int, num_accepted: int
    ) -> list[int]:
        """Up to `most` tokens that may follow `token_ids`, prompt and output so far. The counts are
        of all draft tokens verified so far, and of those that were right."""
        self._learn(len(token_ids), num_drafted, num_accepted)
        if len(token_ids) < self._resumes_at:
            return []
        return self._lookup.guess(token_ids, min(self._length, most))

    def _learn(self, num_tokens: int, num_drafted: int, num_accepted: int) -> None:
        drafted = num_drafted - self._num_drafted
        accepted = num_accepted - self._num_accepted
        self._num_drafted, self._num_accepted = num_drafted, num_accepted
        if not drafted:
            return
        if accepted == drafted:
            self._length = min(2 * max(self._length, drafted), MAX_DRAFTS)
            self._pause = FIRST_PAUSE
        elif accepted:
            self._length = accepted + 1
        else:
            self._length = 1
            self._resumes_at = num_tokens + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
