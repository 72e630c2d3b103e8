"""The shadow worker's model: what it samples, of hashes instead of logits.

A token depends on the hash of all tokens before it, on u, and on every bit of its context: each
entry of the history, each bias that applies, the mask. So a wrong context gives a wrong token. Log
probabilities are hashes too, of the tokens before and the token itself, at most 0.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.request import Sampling, TokenScore

UInt64 = npt.NDArray[np.uint64]
START = np.uint64(0x243F6A8885A308D3)  # the hash of no tokens
_MASK64: Final = (1 << 64) - 1
Mask = frozenset[int]  # the tokens that a grammar allows


def mix(a: UInt64, b: UInt64) -> UInt64:
    with np.errstate(over="ignore"):
        x = (a ^ (b + np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(32))


def mix_one(a: int, b: int) -> int:
    """`mix` of plain numbers."""
    x = (a ^ ((b + 0x9E3779B97F4A7C15) & _MASK64)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 29)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 32)


@dataclass
class Context:
    """What a sample sees besides logits; by token."""

    penalties: tuple[float, ...] = ()  # none = neutral
    history: dict[int, int] = field(default_factory=dict)  # times generated
    biases: dict[int, float] = field(default_factory=dict)  # their sum
    mask: Mask | None = None

    def add_bias(self, token_id: int, bias: float) -> None:
        self.biases[token_id] = self.biases.get(token_id, 0.0) + float(np.float32(bias))

    @property
    def is_empty(self) -> bool:
        return not (self.history or self.biases or self.mask is not None)

    def digest(self) -> int:
        mask = None if self.mask is None else sorted(self.mask)
        parts = self.penalties, sorted(self.history.items()), sorted(self.biases.items()), mask
        return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())

    def allows(self, vocab: int) -> list[bool]:
        """Tokens neither banned nor masked; where that leaves none, the mask decides alone."""
        masked = [self.mask is None or token in self.mask for token in range(vocab)]
        allowed = [
            is_masked and self.biases.get(token) != -math.inf
            for token, is_masked in enumerate(masked)
        ]
        return allowed if any(allowed) else masked


def choose(
    sums: UInt64, u: npt.NDArray[np.float32], temperature: npt.NDArray[np.float32], vocab: int
) -> npt.NDArray[np.int32]:
    """The tokens sampled without a context; greedy rows do not look at u. [n]"""
    grain = np.where(temperature > 0, u.astype(np.float64) * 2.0**24, 0).astype(np.uint64)
    return (mix(sums, grain) % np.uint64(vocab)).astype(np.int32)


def choose_in(context: Context, total: int, u: float, temperature: float, vocab: int) -> int:
    """The token sampled in a context."""
    if not context.is_empty:
        total = mix_one(total, context.digest())
    first = mix_one(total, int(u * 2.0**24) if temperature > 0 else 0) % vocab
    allowed = context.allows(vocab)
    return next(t for t in ((first + i) % vocab for i in range(vocab)) if allowed[t])


def log_probabilities(sums: UInt64, vocab: int) -> npt.NDArray[np.float32]:
    """Of all tokens. [n] → [n, V]"""
    hashes = mix(sums[:, None], np.arange(vocab, dtype=np.uint64)[None])
    return (hashes.astype(np.float64) / -(2.0**60)).astype(np.float32)


def scores_of(
    sums: UInt64, token_ids: Sequence[int], num_candidates: Sequence[int], vocab: int
) -> list[TokenScore]:
    """The reports on tokens [n] behind these sums [n]."""
    scores = []
    for row, token_id, k in zip(
        log_probabilities(sums, vocab), token_ids, num_candidates, strict=True
    ):
        best = np.argsort(-row, kind="stable")[:k].tolist()
        rank = 1 + int((row > row[token_id]).sum())
        top = tuple((token, float(row[token])) for token in best)
        scores.append(TokenScore(token_id, float(row[token_id]), rank, top))
    return scores


def beam_candidates(context: Context, total: int, k: int, vocab: int) -> TokenScore:
    """The k most probable tokens of a beam in a context, banned ones last."""
    sums = np.array([total], np.uint64)
    if not context.is_empty:
        sums = mix(sums, np.array([context.digest()], np.uint64))
    row = np.where(context.allows(vocab), log_probabilities(sums, vocab)[0], np.float32(-math.inf))
    top = tuple((token, float(row[token])) for token in np.argsort(-row, kind="stable")[:k])
    return TokenScore(*top[0], 1, top)


def allowed_after(output: Sequence[int], vocab: int) -> Mask:
    """The grammar of all constrained requests: tokens that may follow these output tokens."""
    last = output[-1] if output else 0
    return frozenset(t for t in range(vocab) if (7 * t + 3 * last + len(output)) % 3)


def context_of(
    sampling: Sampling, is_constrained: bool, prompt: Sequence[int], output: list[int], vocab: int
) -> Context:
    """The context of the sample behind these tokens, by a recount of all of them."""
    context = Context()
    penalties = (
        sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty,
    )  # fmt: skip
    if penalties != (1.0, 0.0, 0.0):
        context.penalties = tuple(float(np.float32(penalty)) for penalty in penalties)
        context.history = dict.fromkeys(prompt, 0) | Counter(output)
    for token_id, bias in sampling.logit_bias:
        context.add_bias(token_id, bias)
    if len(output) < sampling.min_tokens:
        for token_id in sampling.stop_token_ids:
            context.add_bias(token_id, -math.inf)
    known = [*prompt, *output]
    for *beginning, last in sampling.bad_words:
        if known[len(known) - len(beginning) :] == beginning:
            context.add_bias(last, -math.inf)
    if is_constrained:
        context.mask = allowed_after(output, vocab)
    return context
