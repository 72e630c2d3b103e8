"""Refuses a text that has too many tokens before all of it is tokenised.

Tokenising a megabyte or two takes a second and 200 MB, so a text that is far too long must be
refused before that. Two checks, neither of which refuses a text that would fit:

1. by its length in bytes, where the number of bytes per token is bounded: at once;
2. by tokenising piece after piece, until these alone have too many tokens. A cut between pieces
   adds a few tokens, and only changes tokens around it.

The text left to tokenise as a whole is bounded by the number of tokens allowed.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer, models

from scheduler_svc.errors import RequestRejected

PIECE_CHARS: Final = 1 << 16
TOKENS_PER_CUT: Final = 512  # more than a cut can add
CHARS_PER_TOKEN: Final = 4  # of ordinary text: a shorter text is tokenised straight away

NEVER_IN_UTF8: Final = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])

# Tokenizer steps before the model that drop no text, and how many bytes they turn into one at most.
# Composition turns 9 bytes of Hangul into 3, compatibility 4 bytes of a mathematical letter into 1.
KEEPS: Final = {
    "ByteLevel": 1, "Digits": 1, "FixedLength": 1, "Metaspace": 1, "Prepend": 1,
    "UnicodeScripts": 1,
    "Lowercase": 4, "NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenLimit:
    tokens: int
    reason: str  # continues "at most n tokens"


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """How many bytes of text a tokenizer's tokens can represent."""

    longest: int  # bytes of text per token at most
    dropped: bytes = b""  # byte values that the tokenizer drops

    def count(self, text: str) -> int:
        """The bytes of a text that become tokens."""
        content = text.encode()
        return len(content) - sum(map(content.count, self.dropped))

    def check(self, field: str, num_bytes: int, limit: TokenLimit) -> None:
        """Raises RequestRejected. `num_bytes`: what `count` gives."""
        most = limit.tokens * self.longest
        if num_bytes > most:
            raise RequestRejected(
                f"length of {field} in bytes",
                num_bytes,
                f"at most {most}, as no token of this model is longer than {self.longest} bytes, "
                f"and at most {limit.tokens} tokens{limit.reason}",
            )


def token_bytes_of(rust: Tokenizer) -> TokenBytes | None:
    """None if the text of one token has no bound: where spaces are dropped, say, or any unknown
    word is one token."""
    added = rust.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    steps = [*_steps(rust.normalizer), *_steps(rust.pre_tokenizer)]
    if not all(map(_keeps_all, steps)):
        return None
    factor = math.prod(KEEPS.get(step["type"], 1) for step in steps)
    words = rust.get_vocab(with_added_tokens=False)
    dropped = b""
    if any(step["type"] == "ByteLevel" for step in steps):
        if not isinstance(rust.model, models.BPE):
            return None
        dropped = bytes(byte for byte, letter in _byte_letters() if letter not in words)
        if dropped and factor > 1:
            return None  # the model sees other bytes than the text has
        longest = max(map(len, words), default=0)  # one letter per byte
    else:
        if not _falls_back_to_bytes(rust.model, words):
            return None
        longest = max((len(word.encode()) for word in words), default=0)
    return TokenBytes(
        factor * max([longest, *(len(token.content.encode()) for token in added)]), dropped
    )


def refuse_if_too_long(
    field: str,
    text: str,
    limit: TokenLimit,
    token_bytes: TokenBytes | None,
    tokenise: Callable[[str], Sized],
) -> None:
    """Raises RequestRejected for a text that certainly has more tokens than the limit."""
    if token_bytes is not None:
        token_bytes.check(field, token_bytes.count(text), limit)
    if len(text) <= max(PIECE_CHARS, limit.tokens * CHARS_PER_TOKEN):
        return
    num_tokens = 0
    for begin in range(0, len(text), PIECE_CHARS):
        piece = text[begin : begin + PIECE_CHARS]
        num_tokens += max(0, len(tokenise(piece)) - TOKENS_PER_CUT)
        if num_tokens > limit.tokens:
            raise RequestRejected(
                f"least number of tokens in the first {begin + len(piece)} of the {len(text)} "
                f"characters of {field}",
                num_tokens,
                f"at most {limit.tokens}{limit.reason}",
            )


def _steps(component: Any) -> list[Mapping[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, as in tokenizer.json."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return _flat(state)


def _flat(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    parts = state.get("normalizers") or state.get("pretokenizers") or []
    return [step for part in parts for step in _flat(part)]


def _keeps_all(step: Mapping[str, Any]) -> bool:
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    if step["type"] == "Replace":
        old = step["pattern"].get("String")
        return old is not None and len(step["content"].encode()) >= len(old.encode())
    return step["type"] in KEEPS


def _byte_letters() -> Iterator[tuple[int, str]]:
    """The bytes that occur in UTF-8, each with its letter in byte-level vocabularies: that of
    Latin-1 where it is visible."""
    others = itertools.count(0x100)
    for byte in range(0x100):
        is_visible = 0x21 <= byte < 0x7F or (byte >= 0xA1 and byte != 0xAD)
        letter = chr(byte if is_visible else next(others))
        if byte not in NEVER_IN_UTF8:
            yield byte, letter


def _falls_back_to_bytes(model: Any, words: Mapping[str, int]) -> bool:
    if isinstance(model, models.BPE):
        falls_back = model.byte_fallback
    elif isinstance(model, models.Unigram):
        falls_back = json.loads(model.__getstate__()).get("byte_fallback")
    else:
        falls_back = False
    return bool(falls_back) and all(f"<0x{byte:02X}>" in words for byte in range(256))
