"""What a request adds to logits: its logit_bias, and -inf for tokens that must not come next."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from protos.plan import ANY_TOKEN, Float32, Int32

Entries = tuple[Int32, Int32, Float32]  # tokens, bias_after and bias of protos/plan.py; [A] each
Words = Iterable[tuple[int, ...]]


class Biases:
    """The entries of a request's samples.

    Bans: a stop token before `min_tokens` output tokens, and the last token of a bad word where the
    tokens before it, those of the prompt included, are the word's others (as in transformers'
    NoBadWordsLogitsProcessor).
    """

    def __init__(
        self,
        logit_bias: Sequence[tuple[int, float]],
        bad_words: Words,
        stop_token_ids: Iterable[int],
        min_tokens: int,
    ) -> None:
        singles = [word[0] for word in bad_words if len(word) == 1]
        fixed = [*logit_bias, *((token_id, -math.inf) for token_id in singles)]
        self._min_tokens = min_tokens
        self._later = _entries((token_id, ANY_TOKEN, bias) for token_id, bias in fixed)
        stops = [(token_id, ANY_TOKEN, -math.inf) for token_id in sorted(stop_token_ids)]
        self._early = _joined(self._later, _entries(stops))  # before min_tokens
        self._phrases = [word for word in bad_words if len(word) > 1]
        self._by_second_last = defaultdict[int, list[tuple[int, ...]]](list)
        for word in self._phrases:
            self._by_second_last[word[-2]].append(word)
        self._longest = max(map(len, self._phrases), default=0)

    def entries(
        self,
        num_output_tokens: int,
        token_ids: Sequence[int],
        drafts: Sequence[int] = (),
        is_last_unknown: bool = False,
    ) -> Entries:
        """Those of the sample behind `num_output_tokens` output tokens: behind `token_ids` and
        `drafts`, and one more token if that `is_last_unknown`."""
        entries = self._early if num_output_tokens < self._min_tokens else self._later
        if not self._phrases:
            return entries
        tail = (*token_ids[-self._longest :], *drafts)
        bans: list[tuple[int, int, float]] = []
        if is_last_unknown:
            bans = [
                (word[-1], word[-2], -math.inf)
                for word in self._phrases
                if _ends_with(tail, word[:-2])
            ]
        else:
            bans = [
                (word[-1], ANY_TOKEN, -math.inf)
                for word in self._by_second_last.get(tail[-1], ())
                if _ends_with(tail, word[:-1])
            ]
        return _joined(entries, _entries(bans)) if bans else entries


def _ends_with(tokens: tuple[int, ...], suffix: tuple[int, ...]) -> bool:
    return not suffix or tokens[-len(suffix) :] == suffix


def _entries(triples: Iterable[tuple[int, int, float]]) -> Entries:
    tokens, after, bias = zip(*triples, strict=True) if (triples := list(triples)) else ((),) * 3
    return np.array(tokens, np.int32), np.array(after, np.int32), np.array(bias, np.float32)


def _joined(first: Entries, second: Entries) -> Entries:
    return (
        np.concatenate([first[0], second[0]]),
        np.concatenate([first[1], second[1]]),
        np.concatenate([first[2], second[2]]),
    )
