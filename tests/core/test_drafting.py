"""Drafts of a request grow while they are right, and cost little while they are not."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.drafting import Drafter
from scheduler_svc.core.request import Request, Sampling


def decode(prompt: list[int], answer: list[int], speculate: int = 8) -> tuple[Request, list[int]]:
    """An answer that is known beforehand, drafted and verified alone; the length of each draft."""
    request = Request("a", 0, list(prompt), len(prompt), 10_000, Sampling(), speculate=speculate)
    drafter, lengths = Drafter(), []
    while request.num_output_tokens < len(answer):
        draft = drafter.draft(request)
        assert len(draft) <= speculate
        lengths.append(len(draft))
        rest = answer[request.num_output_tokens :]
        right = 0
        while right < min(len(draft), len(rest) - 1) and draft[right] == rest[right]:
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


def test_wrong_drafts_become_rare_and_short() -> None:
    """A text that suggests something wrong at every token pays for it at every token."""
    passage, token_ids = [1, 2, 3], []
    for end in range(100, 400):  # each end is new, and the last one is guessed
        token_ids += [*passage, end]
    request, lengths = decode(token_ids[:40], token_ids[40:])
    assert request.num_accepted > 0, "the passage itself is not guessed"
    wrong = request.num_drafted - request.num_accepted
    assert wrong < len(token_ids) / 20


def test_one_right_draft_ends_the_caution() -> None:
    """A request that repeats itself late never gains from it."""
    text = np.random.default_rng(0).permutation(400).tolist()
    misleading = []
    for start in range(0, 120, 4):  # four tokens of it, and then something else
        misleading += [*text[start : start + 4], 500 + start]
    _, lengths = decode(text, misleading + text[200:])
    assert sum(lengths[: len(misleading) // 2]) < 20
    assert lengths[-10:] == [8] * 9 + lengths[-1:]


def test_no_more_than_was_asked_for() -> None:
    text = list(range(100))
    for speculate in (1, 2, 5):
        _, lengths = decode(text, text[10:], speculate)
        assert max(lengths) == speculate
