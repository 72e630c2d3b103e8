"""Drafts of a request grow while they are right, and become rare while they are not."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.request import Request, Sampling
from scheduler_svc.core.scheduler import drafts_of


def decode(prompt: list[int], answer: list[int], speculate: int = 8) -> tuple[Request, list[int]]:
    """An answer that is known beforehand, drafted and verified alone; the length of each draft."""
    request = Request("a", 0, list(prompt), len(prompt), 10_000, Sampling(), speculate=speculate)
    lengths = []
    while request.num_output_tokens < len(answer):
        rest = answer[request.num_output_tokens :]
        draft = drafts_of(request)[: len(rest) - 1]
        lengths.append(len(draft))
        right = 0
        while right < len(draft) and draft[right] == rest[right]:
            right += 1
        request.num_drafted += len(draft)
        request.num_accepted += right
        request.token_ids += rest[: right + 1]
    return request, lengths


def test_a_copied_text_takes_few_steps() -> None:
    text = np.random.default_rng(0).permutation(400).tolist()
    request, lengths = decode(text, text[10:250])
    assert request.num_accepted == request.num_drafted
    assert len(lengths) < 240 / 7, "drafts stay short"
    assert max(lengths) == 8


def test_a_text_without_repetition_drafts_nothing() -> None:
    request, _ = decode([1, 2, 3], list(range(10, 400)))
    assert request.num_drafted == 0


MISLEADING = [token for end in range(100, 400) for token in (1, 2, 3, end)]  # each end is new


def test_wrong_drafts_become_rare() -> None:
    """A text that suggests something wrong again and again pays for it each time."""
    request, lengths = decode(MISLEADING[:40], MISLEADING[40:])
    assert request.num_accepted == 0
    assert 0 < request.num_drafted < len(MISLEADING) / 40
    assert lengths[-600:] == [0] * 600


def test_one_right_draft_ends_the_caution() -> None:
    """A request that repeats itself late never gains from it."""
    text = np.random.default_rng(0).permutation(range(1000, 1400)).tolist()
    _, lengths = decode(text + MISLEADING[:40], MISLEADING[40:] + text[100:350])
    assert lengths[-10:-1] == [8] * 9
    assert len(lengths) < len(MISLEADING) + 250 / 7 + 10


def test_no_more_than_was_asked_for() -> None:
    text = list(range(100))
    for speculate in (1, 2, 5):
        _, lengths = decode(text, text[10:], speculate)
        assert max(lengths) == speculate
