"""A compiled grammar, and the matcher that follows one answer through it.

Matchers of one grammar share its lexer, which remembers what it has computed: a schema that many
requests use is fast from the second one on. llguidance guards it by a lock that some calls wait for
while they hold the interpreter's; so ours comes first. And its memory is bounded, so that one
answer's share could be another's error: a matcher that fails is tried again with a lexer of its own
before the error counts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_svc.grammar.constraint import Constraint
from scheduler_svc.grammar.limits import parser_limits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Words = npt.NDArray[np.uint32]

MAX_REASON_CHARS: Final = 300  # of which the last 200 mostly say what is wrong


class GrammarFailed(Exception):
    """The grammar cannot be followed further: it has become too complex, or is at a dead end."""


def short_reason(message: str) -> str:
    """llguidance's message without its quotations of the grammar."""
    if message.startswith("NoExtension"):
        return "no text satisfies it"
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines()]
    told = " ".join(line for line in lines if line and "|" not in line[:8] and set(line) != {"^"})
    return told if len(told) <= MAX_REASON_CHARS else f"{told[:100]} … {told[-200:]}"


class Vocabulary:
    """The tokens of a model. `vocab_size` is the model's, which may have more or fewer."""

    def __init__(
        self, tokenizer: LLTokenizer, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self.tokenizer = tokenizer
        num_tokens = min(vocab_size, tokenizer.vocab_size)
        self.is_token = _words(range(num_tokens), num_tokens)  # bit t % 32 of word t / 32
        self.is_eos = _words([t for t in eos_token_ids if t < num_tokens], num_tokens)


def _words(token_ids: Sequence[int], num_tokens: int) -> Words:
    bits = np.zeros(-(-num_tokens // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


class Lexer(NamedTuple):
    """A compiled grammar at its start; its copies share its lexer, under the lock."""

    start: LLMatcher
    lock: threading.Lock


class Grammar:
    """A compiled constraint. Thread-safe."""

    def __init__(self, constraint: Constraint, vocabulary: Vocabulary) -> None:
        self.constraint = constraint
        self.vocabulary = vocabulary
        self._lexer: Lexer | None = None
        self._compiling = threading.Lock()

    @property
    def error(self) -> str:
        """Why it cannot be used, as llguidance says it; "" if it can."""
        return self.lexer().start.get_error()

    def allows(self, token_ids: Sequence[int]) -> bool:
        """Whether an answer may begin with these tokens."""
        start, lock = self.lexer()
        with lock:
            return start.deep_copy().validate_tokens(list(token_ids)) == len(token_ids)

    def lexer(self) -> Lexer:
        """Compiles the grammar if there is none that works."""
        from llguidance import LLMatcher

        with self._compiling:
            if self._lexer is None:
                tokenizer, source = self.vocabulary.tokenizer, self.constraint.source
                start = LLMatcher(tokenizer, source, log_level=0, limits=parser_limits())
                self._lexer = Lexer(start, threading.Lock())
            return self._lexer

    def discard(self, lexer: Lexer) -> None:
        """It does not work any more; nobody else shall begin with it."""
        with self._compiling:
            if self._lexer is lexer:
                self._lexer = None


class Matcher:
    """Follows one answer. For one thread at a time: calls wait for each other.

    Under `ignores_eos` an answer goes on where the grammar lets it, and ends where it must.
    """

    def __init__(self, grammar: Grammar, ignores_eos: bool = False) -> None:
        self.grammar = grammar
        self._ignores_eos = ignores_eos
        self._turn = threading.Lock()
        self._restart(grammar.lexer())

    def copy(self) -> Matcher:
        """For another answer; it reads that from its start."""
        return Matcher(self.grammar, self._ignores_eos)

    def masks(self, output: Sequence[int], drafts: Sequence[int] = ()) -> list[bytes]:
        """The tokens that may follow the answer's tokens, then those that may follow the drafts
        one by one, up to a draft that the grammar forbids. Words as in link_pb2.Mask; none is
        empty. Raises GrammarFailed."""
        with self._turn:
            try:
                return self._masks(list(output), drafts)
            except GrammarFailed:
                self.give_up()
                self._restart(self.grammar.lexer())
                return self._masks(list(output), drafts)

    def give_up(self) -> None:
        """Its lexer has failed, or computes without an end: later matchers get another one."""
        self.grammar.discard(self._lexer)

    def _restart(self, lexer: Lexer) -> None:
        self._lexer = lexer
        self._matcher = lexer.start.deep_copy()
        self._read: list[int] = []

    def _masks(self, output: list[int], drafts: Sequence[int]) -> list[bytes]:
        if output[: len(self._read)] != self._read:  # a beam that continues another one
            self._restart(self._lexer)
        with self._lexer.lock:
            for token_id in output[len(self._read) :]:
                if not self._matcher.consume_token(token_id):
                    raise GrammarFailed(self._why(f"token {token_id} is not allowed"))
            self._read = output
            masks = [self._mask(self._matcher)]
            ahead = self._matcher.deep_copy() if drafts else self._matcher
            for token_id in drafts:
                if not ahead.validate_tokens([token_id]) or not ahead.consume_token(token_id):
                    break
                masks.append(self._mask(ahead))
            return masks

    def _mask(self, matcher: LLMatcher) -> bytes:
        words = self.grammar.vocabulary.is_token
        found = matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarFailed(self._why(matcher.get_error()))
        words = words & np.frombuffer(found, "<u4", len(words))
        if self._ignores_eos:
            others = words & ~self.grammar.vocabulary.is_eos
            words = others if others.any() else words
        if not words.any():
            raise GrammarFailed("no token of the model can continue the answer")
        allowed: bytes = words.tobytes()
        return allowed

    def _why(self, otherwise: str) -> str:
        return short_reason(self._matcher.get_error()) or short_reason(otherwise)
