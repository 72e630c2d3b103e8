"""Long texts are refused without being tokenised, and none that would fit is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from scheduler_svc.errors import RequestRejected
from scheduler_svc.text import prompt_length
from scheduler_svc.text.prompt_length import (
    TokenBytes,
    TokenLimit,
    refuse_if_too_long,
    token_bytes_of,
)
from tests.support.small_tokenizers import byte_level, metaspace


def with_parts(tokenizer: Tokenizer, **parts: Any) -> Tokenizer:
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def without_control_characters() -> Tokenizer:
    """As SmolLM2's: no token for some bytes, which are dropped."""
    letters = [word for word in byte_level().get_vocab() if word not in "ĄĆ" and len(word) == 1]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def words(**settings: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(vocab={"?": 0, "a": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def stripping() -> Tokenizer:
    """As Phi-3's: a token that swallows all the spaces behind it."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    return tokenizer


BOUNDED = {
    "bytes": byte_level([("a", "a"), ("aa", "aa")]),
    "composed": with_parts(byte_level(), normalizer=normalizers.NFC()),
    "dropped": without_control_characters(),
    "pieces": metaspace(),
    "replaced": with_parts(
        metaspace(), normalizer=normalizers.Replace(" ", "▁"), pre_tokenizer=None
    ),
}
UNBOUNDED = {
    "words": words(),
    "stripping": stripping(),
    "spaces collapsed": with_parts(byte_level(), normalizer=normalizers.Replace("  ", " ")),
    "accents dropped": with_parts(byte_level(), normalizer=normalizers.StripAccents()),
    "spaces dropped": with_parts(
        byte_level(),
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    ),
    "no bytes": Tokenizer(models.BPE(vocab={"a": 0}, merges=[])),
}
ALL = {**BOUNDED, **UNBOUNDED}
PARTS = [
    "a",
    "aaaa",
    " ",
    "  ",
    "\n",
    "é",
    "e\u0301",
    "각",
    "👩",
    "x1",
    "<|end|>",
    "\x04",
    "\U0001d400",
]


def count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(parts=st.lists(st.sampled_from(PARTS), min_size=1, max_size=12), times=st.integers(1, 40))
def test_a_text_that_fits_is_never_refused(name: str, parts: list[str], times: int) -> None:
    """A bound that is wrong for some tokenizer refuses prompts that its model could answer."""
    tokenizer = ALL[name]
    text = "".join(parts * times)
    fits = TokenLimit(count(tokenizer, text), "")
    with pytest.MonkeyPatch.context() as patch:  # else only texts of megabytes are cut into pieces
        patch.setattr(prompt_length, "PIECE_CHARS", 50)
        patch.setattr(prompt_length, "CHARS_PER_TOKEN", 0)
        patch.setattr(prompt_length, "TOKENS_PER_CUT", 12)
        refuse_if_too_long(
            "text", text, fits, token_bytes_of(tokenizer), lambda piece: tokenizer.encode(piece).ids
        )


@pytest.mark.parametrize("name", BOUNDED)
def test_a_long_text_is_refused_by_its_bytes(name: str) -> None:
    """Tokenising is what must not happen: a second and 200 MB for every two megabytes."""

    def tokenise(piece: str) -> list[int]:
        raise AssertionError("a text that is refused by its length was tokenised")

    token_bytes = token_bytes_of(BOUNDED[name])
    assert token_bytes is not None
    limit = TokenLimit(100, ", for max_model_len is 101")
    text = "a" * (100 * token_bytes.longest)
    token_bytes.check("text", token_bytes.count(text), limit)
    with pytest.raises(RequestRejected, match=r"length of text in bytes is .*max_model_len is 101"):
        refuse_if_too_long("text", text + "a", limit, token_bytes, tokenise)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_where_bytes_say_nothing_there_is_no_bound(name: str) -> None:
    """There a megabyte of text may be one token."""
    assert token_bytes_of(UNBOUNDED[name]) is None


def test_bytes_that_become_no_token_do_not_count() -> None:
    """Such a text fits, however long it is."""
    token_bytes = token_bytes_of(without_control_characters())
    assert token_bytes == TokenBytes(longest=1, dropped=b"\x04\x06")
    assert token_bytes.count("\x04" * 1000 + "é") == 2


def test_otherwise_only_a_beginning_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing bounds a token's text, a prompt of 64 MB must still cost little."""
    monkeypatch.setattr(prompt_length, "PIECE_CHARS", 100)
    monkeypatch.setattr(prompt_length, "TOKENS_PER_CUT", 10)
    pieces: list[str] = []

    def tokenise(piece: str) -> str:
        pieces.append(piece)
        return piece  # as many tokens as characters

    with pytest.raises(RequestRejected, match="first 200 of the 100000 characters of text is 180"):
        refuse_if_too_long("text", "x" * 100_000, TokenLimit(150, ""), None, tokenise)
    assert list(map(len, pieces)) == [100, 100]
    pieces.clear()
    refuse_if_too_long("text", "x" * 600, TokenLimit(150, ""), None, tokenise)
    assert not pieces, "a text that may well fit was tokenised twice"
