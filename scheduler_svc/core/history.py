"""What penalties see of a request: its distinct tokens, and how often each was generated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protos.plan import Int32


class History:
    """Grows with the answer, so that a step copies two arrays and counts one token."""

    def __init__(self, prompt: Sequence[int]) -> None:
        distinct = np.unique(np.array(prompt, np.int32))
        self._size = len(distinct)
        self._tokens = np.resize(distinct, 2 * self._size + 16)
        self._counts = np.zeros(len(self._tokens), np.int32)
        self._places = dict(zip(distinct.tolist(), range(self._size), strict=True))
        self.num_seen = len(prompt)  # tokens counted, the prompt's included

    def extend(self, token_ids: Sequence[int]) -> None:
        """Counts the generated tokens behind those seen before. `token_ids`: with the prompt."""
        for token_id in token_ids[self.num_seen :]:
            place = self._places.setdefault(token_id, self._size)
            if place == self._size:
                if place == len(self._tokens):
                    self._tokens = np.resize(self._tokens, 2 * place)
                    self._counts = np.resize(self._counts, 2 * place)
                self._tokens[place] = token_id
                self._counts[place] = 0
                self._size += 1
            self._counts[place] += 1
        self.num_seen = len(token_ids)

    def entries(self, drafts: Sequence[int] = ()) -> tuple[Int32, Int32]:
        """Distinct tokens and their counts, with `drafts` counted behind them; [H] each, valid
        until the next `extend`."""
        tokens, counts = self._tokens[: self._size], self._counts[: self._size]
        if not drafts:
            return tokens, counts
        counts = counts.copy()
        new: dict[int, int] = {}
        for token_id in drafts:
            place = self._places.get(token_id)
            if place is None:
                new[token_id] = new.get(token_id, 0) + 1
            else:
                counts[place] += 1
        return (
            np.concatenate([tokens, np.array(list(new), np.int32)]),
            np.concatenate([counts, np.array(list(new.values()), np.int32)]),
        )
