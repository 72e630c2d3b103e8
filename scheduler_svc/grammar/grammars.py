"""A model's grammars: compiles constraints, and keeps what it has compiled and refused lately.

The vocabulary is built by `prepare`, which the thread that loads a model calls once the model is
served, or by the first constrained request. If llguidance cannot read the tokenizer, constrained
requests are refused and all others are served.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from scheduler_svc.errors import RequestRejected
from scheduler_svc.grammar.constraint import Constraint
from scheduler_svc.grammar.matcher import Grammar, Vocabulary, short_reason
from scheduler_svc.grammar.trial import TrialProcess
from scheduler_svc.grammar.vocabulary import UnusableTokenizer, build_tokenizer

logger = logging.getLogger(__name__)

MAX_KEPT: Final = 128  # grammars, and refusals


class Grammars:
    """Thread-safe."""

    def __init__(
        self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._preparing = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._trials: TrialProcess | None = None
        self._why_none: str | None = None
        self._is_closed = False
        self._kept: OrderedDict[str, Grammar | str] = OrderedDict()  # by source
        self._keeping = threading.Lock()

    def prepare(self) -> None:
        """Builds the vocabulary, unless that is done."""
        with self._preparing:
            if self._vocabulary is not None or self._why_none is not None or self._is_closed:
                return
            try:
                text = self._tokenizer_json()
                tokenizer = build_tokenizer(text, self._vocab_size, self._eos_token_ids)
            except UnusableTokenizer as error:
                self._why_none = str(error)
                logger.warning("constrained requests are refused: %s", error)
                return
            self._trials = TrialProcess(text, self._vocab_size, self._eos_token_ids)
            self._vocabulary = Vocabulary(tokenizer, self._vocab_size, self._eos_token_ids)

    def compile(self, constraint: Constraint) -> Grammar:
        """Raises RequestRejected, naming the field and the reason."""
        with self._keeping:
            kept = self._kept.get(constraint.source)
            if kept is not None:
                self._kept.move_to_end(constraint.source)
        if kept is None:
            kept = self._compile(constraint)
            with self._keeping:
                self._kept[constraint.source] = kept
                while len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        if isinstance(kept, str):
            raise RequestRejected(constraint.field, constraint.shown, kept)
        return kept

    def _compile(self, constraint: Constraint) -> Grammar | str:
        self.prepare()
        if self._vocabulary is None or self._trials is None:
            return f"unset with this model: {self._why_none or 'the server is stopping'}"
        reason = self._trials.why_refused(constraint.source)
        if reason is None:
            grammar = Grammar(constraint, self._vocabulary)
            reason = grammar.error
            if not reason:
                return grammar
        return f"what llguidance can compile; it says: {short_reason(reason)}"

    def close(self) -> None:
        with self._preparing:
            self._is_closed = True
            if self._trials is not None:
                self._trials.close()
