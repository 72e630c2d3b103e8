"""What is added to logits, and what is banned: logit_bias, bad_words, min_tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from protos.plan import ANY_TOKEN
from scheduler_svc.core.biases import Biases, Entries

BANNED = -math.inf


def triples(entries: Entries) -> list[tuple[int, int, float]]:
    tokens, after, bias = entries
    assert (tokens.dtype, after.dtype, bias.dtype) == (np.int32, np.int32, np.float32)
    return list(zip(tokens.tolist(), after.tolist(), bias.tolist(), strict=True))


def test_logit_bias_is_always_there() -> None:
    """A bias that is lost when nothing else is asked for."""
    biases = Biases([(3, 1.5), (7, -100.0)], [], {2}, 0)
    assert triples(biases.entries(0, [1])) == [(3, ANY_TOKEN, 1.5), (7, ANY_TOKEN, -100.0)]


def test_stop_tokens_are_banned_before_min_tokens() -> None:
    """An answer ends too early, or may not end when it has its tokens."""
    biases = Biases([], [], {9, 2}, 2)
    banned = [(2, ANY_TOKEN, BANNED), (9, ANY_TOKEN, BANNED)]
    assert triples(biases.entries(0, [1])) == banned
    assert triples(biases.entries(1, [1], is_last_unknown=True)) == banned
    assert triples(biases.entries(2, [1, 5, 6])) == []


@pytest.mark.parametrize(
    ("known", "drafts", "is_last_unknown", "bans"),
    [
        ([1], (), False, {5: ANY_TOKEN}),
        ([1, 6], (), False, {5: ANY_TOKEN, 7: ANY_TOKEN}),
        ([1, 3, 4], (), False, {5: ANY_TOKEN, 8: ANY_TOKEN}),
        ([4], (), False, {5: ANY_TOKEN}),  # shorter than the word
        ([1, 3], (4,), False, {5: ANY_TOKEN, 8: ANY_TOKEN}),
        ([1, 4], (3,), False, {5: ANY_TOKEN}),
        ([1], (), True, {5: ANY_TOKEN, 7: 6}),
        ([1, 3], (), True, {5: ANY_TOKEN, 7: 6, 8: 4}),
        ([3, 1], (), True, {5: ANY_TOKEN, 7: 6}),
    ],
)
def test_bad_words_ban_their_last_token_behind_the_others(
    known: list[int], drafts: tuple[int, ...], is_last_unknown: bool, bans: dict[int, int]
) -> None:
    """A word is completed, or a token is banned that completes nothing; a word whose beginning ends
    with a token that only the device knows is forgotten."""
    biases = Biases([], [(5,), (6, 7), (3, 4, 8)], {2}, 0)
    found = triples(biases.entries(0, known, drafts, is_last_unknown))
    assert found == [(token, after, BANNED) for token, after in bans.items()]
