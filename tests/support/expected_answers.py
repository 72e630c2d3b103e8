"""What each request must produce with the shadow worker's model, from its own tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.request import FinishReason, NewRequest, Sampling, TokenScore
from scheduler_svc.core.seeds import streams, uniforms
from tests.support.shadow_model import (
    START,
    UInt64,
    choose,
    choose_in,
    context_of,
    mix,
    scores_of,
)


@dataclass(frozen=True)
class Expected:
    """Of one sibling."""

    tokens: list[int]
    scores: list[TokenScore]  # of tokens that were not delivered before
    prompt_scores: list[TokenScore]
    beam_score: float | None = None  # of an answer of a beam search, and why that ended
    reason: FinishReason | None = None


def expected_answers(
    family: Sequence[tuple[NewRequest, int]], vocab: int, windows: Sequence[int] = (0,)
) -> list[Expected]:
    """Of requests, with the index of the sibling; all of them side by side. A resumed answer is the
    same as one that was never interrupted."""
    n = len(family)
    news = [new for new, _ in family]
    num_prompt = np.array([len(new.prompt_token_ids) for new in news])
    limit = num_prompt + np.array([new.max_tokens for new in news])
    longest = int(limit.max())
    tokens = np.zeros((n, longest), np.uint64)
    for i, new in enumerate(news):
        tokens[i, : num_prompt[i]] = new.prompt_token_ids
    heat = np.array([new.sampling.temperature for new in news], np.float32)
    seed = np.array([new.sampling.seed for new in news], np.uint64)
    stream = streams(seed, np.array([index for _, index in family], np.uint64))
    history = np.full(n, START, np.uint64)
    totals = [np.zeros(n, np.uint64) for _ in windows]
    terms: list[UInt64] = []
    sums_at = np.zeros((n, longest), np.uint64)  # by the position whose logits they stand for
    is_special = np.array([_has_context(new) for new in news])
    for position in range(longest - 1):
        active = position < limit - 1
        history = np.where(active, mix(history, tokens[:, position]), history)
        with np.errstate(over="ignore"):
            terms.append(history * np.uint64(2 * position + 1))
            for group, window in enumerate(windows):
                totals[group] = totals[group] + terms[-1]
                if window and position >= window:
                    totals[group] = totals[group] - terms[position - window]
        sums = totals[0]
        for total in totals[1:]:
            sums = mix(sums, total)
        sums_at[:, position] = sums
        samples = active & (position >= num_prompt - 1)
        u = uniforms(stream, np.full(n, position + 1))
        tokens[samples, position + 1] = choose(sums, u, heat, vocab)[samples]
        for i in np.flatnonzero(samples & is_special).tolist():
            new = news[i]
            output = tokens[i, num_prompt[i] : position + 1].astype(np.int64).tolist()
            context = context_of(
                new.sampling, new.is_constrained, new.prompt_token_ids, output, vocab
            )
            tokens[i, position + 1] = choose_in(
                context, int(sums[i]), float(u[i]), float(heat[i]), vocab
            )
    return [
        _expected(new, index, tokens[i, : limit[i]], sums_at[i], vocab)
        for i, (new, index) in enumerate(family)
    ]


def expected(
    requests: Sequence[NewRequest], vocab: int, windows: Sequence[int] = (0,)
) -> dict[tuple[str, int], list[int]]:
    """The tokens of each request and sibling, by request_id and index."""
    family = [(new, new.index + number) for new in requests for number in range(new.n)]
    answers = expected_answers(family, vocab, windows)
    return {
        (new.request_id, index): answer.tokens
        for (new, index), answer in zip(family, answers, strict=True)
    }


def _expected(new: NewRequest, index: int, tokens: UInt64, sums: UInt64, vocab: int) -> Expected:
    num_prompt = len(new.prompt_token_ids)
    output = tokens[num_prompt:].astype(np.int64).tolist()
    for end, token in enumerate(output):
        if token in new.sampling.stop_token_ids:
            output = output[: end + 1]
            break
    scores: list[TokenScore] = []
    prompt_scores: list[TokenScore] = []
    if new.sampling.logprobs is not None:
        rest = output[len(new.output_token_ids) :]
        begin = num_prompt + len(new.output_token_ids) - 1
        k = [new.sampling.logprobs] * len(rest)
        scores = scores_of(sums[begin : begin + len(rest)], rest, k, vocab)
    is_scored = new.prompt_logprobs is not None and not new.output_token_ids
    if is_scored and index == new.index:
        rest = list(new.prompt_token_ids[1:])
        k = [new.prompt_logprobs or 0] * len(rest)
        prompt_scores = scores_of(sums[: len(rest)], rest, k, vocab)
    return Expected(output, scores, prompt_scores)


def _has_context(new: NewRequest) -> bool:
    plain = Sampling()
    names = (
        "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "bad_words",
        "min_tokens",
    )  # fmt: skip
    return new.is_constrained or any(
        getattr(new.sampling, name) != getattr(plain, name) for name in names
    )


def expected_tokens(
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    vocab_size: int,
    temperature: Sequence[float] | None = None,
    seeds: Sequence[int] | None = None,
    stop_token_ids: Sequence[frozenset[int]] | None = None,
    windows: Sequence[int] = (0,),
    siblings: Sequence[int] | None = None,
) -> list[list[int]]:
    """The tokens of requests that ask for nothing but these."""
    n = len(prompts)
    family = [
        (
            NewRequest(
                "", prompt, limit, Sampling(temperature=heat, seed=seed, stop_token_ids=stops)
            ),
            sibling,
        )
        for prompt, limit, heat, seed, stops, sibling in zip(
            prompts,
            max_tokens,
            temperature or [0.0] * n,
            seeds or [0] * n,
            stop_token_ids or [frozenset()] * n,
            siblings or [0] * n,
            strict=True,
        )
    ]
    return [answer.tokens for answer in expected_answers(family, vocab_size, windows)]
