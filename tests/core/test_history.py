"""The history that penalties see, against a plain recount."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from scheduler_svc.core.history import History


def recounted(prompt: list[int], output: list[int]) -> dict[int, int]:
    """Token → times generated, 0 for those of the prompt only."""
    return dict.fromkeys(prompt, 0) | Counter(output)


@pytest.mark.parametrize("seed", range(5))
def test_it_equals_a_recount_however_it_grew(seed: int) -> None:
    """A token counted twice, or one of the prompt counted as generated, is penalised wrongly."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 40, rng.integers(1, 30)).tolist()
    output = rng.integers(0, 80, 100).tolist()
    history, known = History(prompt), 0
    while known < len(output):
        known += int(rng.integers(0, 4))
        history.extend(prompt + output[:known])
        drafts = output[known : known + 3]
        for more in ([], drafts):
            tokens, counts = history.entries(more)
            assert len(set(tokens.tolist())) == len(tokens), "not distinct"
            assert (tokens.dtype, counts.dtype) == (np.int32, np.int32)
            pairs = dict(zip(tokens.tolist(), counts.tolist(), strict=True))
            assert pairs == recounted(prompt, output[:known] + more)
