"""What a beam search must find with the shadow worker's model, from the tokens alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler_svc.core.beams import Candidates, Search
from scheduler_svc.core.request import NewRequest
from tests.support.expected_answers import Expected, expected_answers
from tests.support.shadow_model import START, UInt64, beam_candidates, context_of, mix


def expected_beams(new: NewRequest, vocab: int, windows: Sequence[int] = (0,)) -> list[Expected]:
    """The answers, best first. The rules are the search's own, which other tests compare with
    transformers'; each beam's candidates follow from a recount of all of its tokens."""
    assert new.beams is not None
    search, prompt = Search(new.beams, new.sampling, new.max_tokens), list(new.prompt_token_ids)
    while not search.has_ended:
        outputs = [beam.token_ids for beam in search.beams]
        totals = _sums([prompt + output for output in outputs], windows)
        candidates = []
        for output, total in zip(outputs, totals.tolist(), strict=True):
            context = context_of(new.sampling, new.is_constrained, prompt, output, vocab)
            top = beam_candidates(context, total, search.num_candidates, vocab).top
            token_ids, logprobs = zip(*top, strict=True)
            candidates.append(
                Candidates(np.array(token_ids, np.int32), np.array(logprobs, np.float32))
            )
        search.advance(candidates)
    prompt_scores = expected_answers([(new, 0)], vocab, windows)[0].prompt_scores
    return [
        Expected(
            answer.token_ids,
            answer.scores,
            [] if index else prompt_scores,
            answer.score,
            answer.reason,
        )
        for index, answer in enumerate(search.answers())
    ]


def _sums(sequences: list[list[int]], windows: Sequence[int]) -> UInt64:
    """What stands for the logits behind these sequences of one length. [n]"""
    tokens = np.array(sequences, np.uint64)
    length = tokens.shape[1]
    history = np.full(len(tokens), START, np.uint64)
    terms = np.zeros(tokens.shape, np.uint64)
    with np.errstate(over="ignore"):
        for position in range(length):
            history = mix(history, tokens[:, position])
            terms[:, position] = history * np.uint64(2 * position + 1)
        first, *others = (
            terms[:, max(0, length - window) if window else 0 :].sum(axis=1, dtype=np.uint64)
            for window in windows
        )
        for other in others:
            first = mix(first, other)
    return first
