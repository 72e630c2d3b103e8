"""Guesses from a request's own text."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.core import prompt_lookup
from scheduler_svc.core.prompt_lookup import (
    LONGEST_MATCH,
    MOST_PLACES,
    SHORTEST_MATCH,
    PromptLookup,
)


def plain_search(token_ids: list[int], most: int) -> list[int]:
    """The same guess, by looking at every place."""
    end, best, longest = len(token_ids), 0, SHORTEST_MATCH - 1
    for place in range(end - 1, 0, -1):
        agree = zip(reversed(token_ids[:place]), reversed(token_ids), strict=False)
        length = 0
        for one, other in agree:
            if one != other or length == LONGEST_MATCH:
                break
            length += 1
        if length > longest:
            best, longest = place, length
    text, most = list(token_ids), min(most, longest)
    while best and len(text) < end + most:
        text.append(text[best + len(text) - end])
    return text[end:]


@pytest.mark.parametrize("vocab_size", [6, 100, 50_000])
def test_guesses_are_those_of_a_plain_search(
    vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place is missed, or one that fits less is preferred: by chance, or where the table grows,
    or between places added one by one and in bulk."""
    monkeypatch.setattr(prompt_lookup, "MOST_PLACES", 400)
    rng = np.random.default_rng(vocab_size)
    num_guesses = 0
    for _ in range(20):
        token_ids = rng.integers(0, vocab_size, int(rng.integers(1, 120))).tolist()
        lookup = PromptLookup()
        while len(token_ids) < 400:
            guess = lookup.guess(token_ids, 5)
            assert guess == plain_search(token_ids, 5)
            num_guesses += bool(guess)
            start = int(rng.integers(len(token_ids)))
            if rng.random() < 0.3:  # quotes itself
                token_ids += token_ids[start : start + int(rng.integers(1, 40))]
            else:
                token_ids += rng.integers(0, vocab_size, int(rng.integers(1, 4))).tolist()
    assert num_guesses > 200


def test_the_longest_match_wins_then_the_latest() -> None:
    """What followed a shorter match is guessed, or something out of date."""
    passage = [1, 2, 3]
    token_ids = [9, *passage, 40, 8, *passage, 41, 8, *passage, 42, 7, *passage, 43, 8, *passage]
    assert PromptLookup().guess(token_ids, 1) == [42]
    assert PromptLookup().guess([5, *token_ids[1:-4], 6, *passage], 1) == [43]


@pytest.mark.parametrize("token_ids", [[], [1], [1, 2, 3], [1, 2, 3, 1, 2], list(range(50))])
def test_a_new_end_gives_no_guess(token_ids: list[int]) -> None:
    assert PromptLookup().guess(token_ids, 5) == []


def test_a_text_that_repeats_itself_goes_on() -> None:
    """The guess ends where the text ends, in the middle of a loop."""
    assert PromptLookup().guess([1, 2, 1, 2, 1, 2], 5) == [1, 2, 1, 2]
    assert PromptLookup().guess([7, 7, 7, 7], 3) == [7, 7, 7]


def test_work_is_bounded_however_long_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token costs more the longer the text is: places looked at, or tables built anew."""
    lookup, token_ids = PromptLookup(), [1, 2, 3, 4] * 25_000
    reads = 0

    class Counted(list[int]):
        def __getitem__(self, at):  # type: ignore[no-untyped-def]
            nonlocal reads
            reads += 1 if isinstance(at, int) else len(range(*at.indices(len(self))))
            return super().__getitem__(at)

    built = []
    build = PromptLookup._extend_by_many
    monkeypatch.setattr(
        prompt_lookup.PromptLookup,
        "_extend_by_many",
        lambda self, *rest: built.append(build(self, *rest)),
    )
    token_ids = Counted(token_ids)
    lookup.guess(token_ids, 8)
    reads = 0
    for _ in range(1000):
        token_ids.append(token_ids[-4])
        lookup.guess(token_ids, 8)
    assert len(built) == 1
    assert reads < 1000 * (2 * MOST_PLACES + 2 * LONGEST_MATCH + 30)
    assert lookup._heads.nbytes + lookup._earlier.nbytes <= 16 * len(token_ids)


def test_a_guess_is_no_longer_than_its_evidence() -> None:
    """Three tokens in common promise a page, or persuade a request that asks for more."""
    token_ids = [9, 1, 2, 3, 10, 11, 12, 13, 14, 8, 1, 2, 3]
    assert PromptLookup().guess(token_ids, 8) == [10, 11, 12]
    assert PromptLookup().guess(token_ids, 8, 4) == []
