"""How many tokens a request drafts, and on which evidence, by what became of its last drafts.

A draft token that is rejected costs the computation of a token, and a row that drafts is not
planned ahead. So a draft is as long as the last one promises: twice as long after one that was
right to its end, else what was right of it and one more. It is never longer than the passage that
suggests it. And each draft that was mostly wrong makes the request ask for a longer passage, each
that was right for a shorter one. So English prose drafts next to nothing, and a copied text nearly
all of itself.

Pure: drafts follow from the request's tokens and counts alone. So preemptions and lost workers
change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from protos.sampling import MAX_DRAFTS
from scheduler_svc.core.prompt_lookup import SHORTEST_MATCH, PromptLookup

FIRST_LENGTH: Final = 3  # of a draft
MOST_NEEDED: Final = 12  # tokens of a passage that suggests a draft


class Drafter:
    """The drafts of one request."""

    def __init__(self) -> None:
        self._lookup = PromptLookup()
        self._length = FIRST_LENGTH
        self._needed = SHORTEST_MATCH
        self._num_drafted = 0  # at the last call
        self._num_accepted = 0

    def draft(
        self, token_ids: Sequence[int], most: int, num_drafted: int, num_accepted: int
    ) -> list[int]:
        """Up to `most` tokens that may follow `token_ids`, prompt and output so far. The counts are
        of all draft tokens verified so far, and of those that were right."""
        self._learn(num_drafted, num_accepted)
        return self._lookup.guess(token_ids, min(self._length, most), self._needed)

    def _learn(self, num_drafted: int, num_accepted: int) -> None:
        drafted = num_drafted - self._num_drafted
        accepted = num_accepted - self._num_accepted
        self._num_drafted, self._num_accepted = num_drafted, num_accepted
        if not drafted:
            return
        if accepted == drafted:
            self._length = min(2 * max(self._length, drafted), MAX_DRAFTS)
            self._needed = max(self._needed - 1, SHORTEST_MATCH)
            return
        self._length = accepted + 1
        if 2 * accepted < drafted:
            self._needed = min(self._needed + 1, MOST_NEEDED)
