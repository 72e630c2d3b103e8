"""Seeded random requests for simulations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from scheduler_svc.core.request import BeamSearch, NewRequest, Sampling
from tests.support.expected_answers import expected_answers


def random_requests(
    rng: np.random.Generator,
    count: int,
    *,
    prompt: tuple[int, int] = (1, 32),
    output: tuple[int, int] = (1, 32),
    vocab_size: int = 50,
    stop_share: float = 0.3,
    sampled_share: float = 0.3,
    prefixes: int = 0,
    fork_share: float = 0.0,
    priorities: int = 1,
    speculate_share: float = 0.0,
    score_share: float = 0.0,
    special_share: float = 0.0,
    beam_share: float = 0.0,
) -> list[NewRequest]:
    """Requests with uniform lengths in the given ranges (both ends included).

    With `prefixes`, most prompts begin like one of that many long ones. `special_share` of them
    have penalties, biases, bad words, a minimal length, log probabilities and grammars.
    """
    requests = []
    shared = [rng.integers(0, vocab_size, prompt[1]).tolist() for _ in range(prefixes)]
    for i in range(count):
        stops = frozenset(
            rng.integers(0, vocab_size, 2).tolist() if rng.random() < stop_share else []
        )
        tokens = rng.integers(0, vocab_size, rng.integers(prompt[0], prompt[1] + 1)).tolist()
        if shared and rng.random() < 0.8:
            begin = shared[int(rng.integers(prefixes))][: int(rng.integers(len(tokens) + 1))]
            tokens[: len(begin)] = begin
        only_scores = score_share > 0 and rng.random() < score_share
        speculates = speculate_share > 0 and rng.random() < speculate_share
        n = int(rng.integers(2, 5)) if rng.random() < fork_share else 1
        new = NewRequest(
            request_id=f"r{i}",
            prompt_token_ids=tokens,
            n=1 if only_scores else n,
            speculate=3 if speculates else 0,
            priority=int(rng.integers(priorities)),
            cache_salt="other" if rng.random() < 0.1 else "",
            max_tokens=0 if only_scores else int(rng.integers(output[0], output[1] + 1)),
            sampling=Sampling(
                temperature=1.0 if rng.random() < sampled_share else 0.0,
                seed=int(rng.integers(0, 2**63)),
                stop_token_ids=stops,
            ),
        )
        if special_share and rng.random() < special_share:
            new = _special(rng, new, vocab_size)
        if beam_share and new.max_tokens and rng.random() < beam_share:
            new = _beam_search(rng, new, vocab_size)
        requests.append(new)
    return requests


def _special(rng: np.random.Generator, new: NewRequest, vocab: int) -> NewRequest:
    """The request, with some of what few requests ask for."""

    def token() -> int:
        return int(rng.integers(vocab))

    sampling: dict[str, Any] = {}
    names = "repetition_penalty", "frequency_penalty", "presence_penalty"
    if rng.random() < 0.4:
        sampling[names[rng.integers(3)]] = 1.5
    if rng.random() < 0.3:
        biases = {token(): float(rng.integers(-3, 4)) for _ in range(rng.integers(1, 4))}
        sampling["logit_bias"] = tuple(sorted(biases.items()))
    if rng.random() < 0.4:
        lengths = rng.integers(1, 4, rng.integers(1, 6)).tolist()
        sampling["bad_words"] = tuple(tuple(token() for _ in range(n)) for n in lengths)
    if rng.random() < 0.4:
        sampling["min_tokens"] = int(rng.integers(0, new.max_tokens + 1))
    if rng.random() < 0.4:
        sampling["logprobs"] = int(rng.integers(0, 3))
    scores = rng.random() < 0.3
    return replace(
        new,
        sampling=replace(new.sampling, **sampling),
        index=int(rng.integers(3)),
        prompt_logprobs=int(rng.integers(0, 3)) if scores else None,
        is_constrained=bool(rng.random() < 0.3),
    )


def _beam_search(rng: np.random.Generator, new: NewRequest, vocab: int) -> NewRequest:
    """The request as a beam search."""
    width = int(rng.integers(2, 5))
    beams = BeamSearch(
        width,
        num_answers=int(rng.integers(1, width + 1)),
        length_penalty=float(rng.choice([0.0, 1.0, 1.5, -0.5])),
        early_stopping=bool(rng.random() < 0.5),
        vocab_size=vocab,
    )
    return replace(new, beams=beams, n=1, speculate=0, index=0)


def some_resumed(
    rng: np.random.Generator,
    requests: list[NewRequest],
    share: float,
    vocab: int,
    windows: Sequence[int] = (0,),
) -> list[NewRequest]:
    """The same requests, some of them as answers that go on, or that had just ended."""
    answers = expected_answers([(new, new.index) for new in requests], vocab, windows)
    resumed = []
    for new, answer in zip(requests, answers, strict=True):
        is_resumed = new.n == 1 and new.beams is None and rng.random() < share
        known = int(rng.integers(len(answer.tokens) + 1)) if is_resumed else 0
        resumed.append(replace(new, output_token_ids=answer.tokens[:known]))
    return resumed
