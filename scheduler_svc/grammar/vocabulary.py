"""A model's tokens as llguidance needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class UnusableTokenizer(ValueError):
    """llguidance cannot read the tokenizer; the message says why."""


def build_tokenizer(
    tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]
) -> LLTokenizer:
    """llguidance's form of a tokenizer.json. Takes a third of a second for 49k tokens, and holds
    the interpreter's lock for as long. Raises UnusableTokenizer."""
    from llguidance import LLTokenizer

    if not eos_token_ids:
        raise UnusableTokenizer("the model has no EOS token, which would end a constrained answer")
    try:
        # some models have rows to spare in their output, others fewer than the tokenizer has tokens
        for num_tokens in (vocab_size, None):
            try:
                return LLTokenizer(tokenizer_json, num_tokens, list(eos_token_ids))
            except ValueError:
                if num_tokens is None:
                    raise
    except BaseException as error:  # also a panic in Rust
        raise UnusableTokenizer(f"its tokenizer cannot be read by llguidance: {error}") from error
    raise AssertionError("unreachable")
