"""Streamed text: whole characters, no part of a stop string, and joined exactly the full text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from scheduler_svc.text.stop_strings import StopStrings
from scheduler_svc.text.text import (
    CONTEXT_TOKENS,
    MAX_HELD_TOKENS,
    REPLACEMENT,
    Detokenizer,
    OutputText,
    Pieces,
)
from tests.support.small_tokenizers import byte_level, metaspace

BYTES = byte_level()
MERGED = byte_level([("Ċ", "Ċ"), ("E", "N"), ("a", "b"), ("ð", "Ł"), ("¬", "â")])
PIECES = metaspace()
TOKENIZERS = pytest.mark.parametrize(
    "tokenizer", [BYTES, MERGED, PIECES], ids=["bytes", "merged", "pieces"]
)
HARD_TEXTS = ["naïve ďábel", "สวัสดี", "👩‍👩‍👧 ok", "\u0065\u0301", "a  b\n\n", "𐍈𐍈𐍈 x", "the a"]


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def decoder(tokenizer: Tokenizer) -> partial[str]:
    return partial(tokenizer.decode, skip_special_tokens=True)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def expected(
    text: str, stops: Sequence[str], is_included: bool, num_protected: int = 0
) -> tuple[str, str | None]:
    """The obvious twin: look for a stop string after every single character."""
    for end in range(num_protected + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return (text[:end] if is_included else text[: end - len(stop)]), stop
    return text, None


def stream(stream: OutputText, ids: Sequence[int]) -> list[str]:
    return [*(stream.push(token_id) for token_id in ids), stream.finish()]


@TOKENIZERS
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_joined_deltas_are_the_full_decode(tokenizer: Tokenizer, text: str) -> None:
    """Without this, streamed and unary text could differ in accents, emoji, Thai or spaces."""
    ids = encode(tokenizer, text)
    deltas = stream(OutputText(decoder(tokenizer), []), ids)
    assert "".join(deltas) == decode(tokenizer, ids) == text
    assert not any(REPLACEMENT in delta for delta in deltas)


@TOKENIZERS
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_text_goes_on_from_the_prompt(tokenizer: Tokenizer, text: str) -> None:
    """Without context the first space of an answer is lost with sentencepiece's kind."""
    prompt = encode(tokenizer, "a word")
    answer = encode(tokenizer, text)
    deltas = stream(OutputText(decoder(tokenizer), prompt), answer)
    assert "a word" + "".join(deltas) == decode(tokenizer, prompt + answer)


def test_a_character_is_shown_with_its_last_byte() -> None:
    """Holding back for longer than a character needs is latency that users see."""
    deltas = stream(OutputText(decoder(BYTES), []), encode(BYTES, "ď€x"))
    assert deltas == ["", "ď", "", "", "€", "x", ""]


def test_a_chain_of_tokens_that_each_end_inside_a_character_flows() -> None:
    """A stream that waits for a clean end would show nothing until the chain breaks."""
    chain = byte_level([("¬", "â")])  # the last byte of € and its first
    ids = encode(chain, "€" * 40)
    assert len(ids) < 3 * 40, "the merge over character borders is not used"
    detokenizer = Detokenizer(decoder(chain), [])
    shown = [len(detokenizer.push(token_id)) for token_id in ids]
    longest_pause = max(len(run) for run in "".join("01"[min(n, 1)] for n in shown).split("1"))
    assert longest_pause <= 3


@TOKENIZERS
def test_broken_characters_are_replaced_only_when_nothing_can_mend_them(
    tokenizer: Tokenizer,
) -> None:
    """An unfinished character at the end must be delivered, as the full decode shows it."""
    ids = encode(tokenizer, "ok €")[:-1]
    *deltas, last = stream(OutputText(decoder(tokenizer), []), ids)
    assert "".join(deltas) == "ok "
    assert set(last) == {REPLACEMENT}
    assert "".join([*deltas, last]) == decode(tokenizer, ids)


def test_endless_garbage_comes_out_and_stays_cheap() -> None:
    """The window must not grow with the answer: a step would take longer and longer."""
    broken = encode(BYTES, "ÿ")[:1]
    windows: list[int] = []

    def watched(ids: list[int]) -> str:
        windows.append(len(ids))
        return decode(BYTES, ids)

    text = "".join(stream(OutputText(watched, []), broken * 1000))
    assert text == decode(BYTES, broken * 1000)
    assert max(windows) <= 2 * MAX_HELD_TOKENS + CONTEXT_TOKENS


def test_a_long_answer_is_decoded_in_short_windows() -> None:
    """Decoding everything again with each token makes long answers quadratic."""
    windows: list[int] = []

    def watched(ids: list[int]) -> str:
        windows.append(len(ids))
        return decode(BYTES, ids)

    text = "the quick brown fox " * 20
    assert "".join(stream(OutputText(watched, []), encode(BYTES, text))) == text
    assert max(windows) <= 3 * CONTEXT_TOKENS
    assert len(windows) < 1.3 * len(text)


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_a_prompt_that_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    """tokenizers' DecodeStream repeats the prompt's text here."""
    ids = encode(tokenizer, "price: €")
    deltas = stream(OutputText(decoder(tokenizer), ids[:-1]), ids[-1:])
    assert "".join(deltas) == "€"


def test_a_prompt_that_ends_in_a_replacement_character() -> None:
    """Taken for an unfinished character, it would be shown as part of the answer."""
    deltas = stream(OutputText(decoder(BYTES), encode(BYTES, "x\ufffd")), encode(BYTES, "y"))
    assert "".join(deltas) == "y"


def test_context_never_begins_inside_a_character() -> None:
    """A run of byte tokens cut in its middle decodes to garbage, all of the answer with it."""
    prompt = encode(PIECES, "กขคงจ")
    deltas = stream(OutputText(decoder(PIECES), prompt), encode(PIECES, "ฉ")[1:])
    assert "".join(deltas) == "ฉ"


def test_a_rewritten_byte_run_does_not_break_the_stream() -> None:
    """tokenizers' DecodeStream raises from here on: the engine would fall with it."""
    shown_then_broken = [3 + 0x41, 3 + 0xFF, PIECES.token_to_id("b")]
    deltas = stream(OutputText(decoder(PIECES), []), shown_then_broken)
    assert deltas[0] == "A"
    assert "".join(deltas).endswith("b")


@pytest.mark.parametrize("stop", ["END", "\n\n", "สต", "aab", "👩‍👧"])
@pytest.mark.parametrize("before", ["", "x", "a", "E", "ENEN"])
@pytest.mark.parametrize("is_included", [False, True])
def test_a_stop_string_split_in_every_way_never_leaks(
    stop: str, before: str, is_included: bool
) -> None:
    """Part of a stop string that was shown cannot be taken back."""
    text = before + stop + "after"
    want, matched = expected(text, [stop], is_included)
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            strings = StopStrings([stop], is_included)
            parts = [text[:first], text[first:second], text[second:]]
            shown = [strings.push(part) for part in parts]
            assert "".join(shown) + strings.finish() == want
            assert strings.matched == matched


@TOKENIZERS
@pytest.mark.parametrize("is_included", [False, True])
def test_a_stop_string_over_tokens(tokenizer: Tokenizer, is_included: bool) -> None:
    """The same with real tokens, where a stop string begins and ends inside them."""
    ids = encode(tokenizer, "the a END. more")
    output = OutputText(
        decoder(tokenizer), [], stop=["END"], include_stop_str_in_output=is_included
    )
    deltas = stream(output, ids)
    assert "".join(deltas) == ("the a END" if is_included else "the a ")
    assert output.matched_stop == "END"


def test_only_what_begins_a_stop_string_is_held_back() -> None:
    """A fixed window delays every word of every answer by the longest stop string."""
    strings = StopStrings(["\n\nUser:", "END"], False)
    assert strings.push("Hello E") == "Hello "
    assert strings.push("a") == "Ea"
    assert strings.push("x\n") == "x"
    assert strings.push("\n") == ""
    assert strings.push("\n") == "\n"
    assert strings.push("User") == ""
    assert strings.push("s") == "\n\nUsers"


def test_a_partial_stop_string_at_the_end_is_delivered() -> None:
    """At a length end it was no stop string: swallowing it loses text."""
    output = OutputText(decoder(BYTES), [], stop=["END"])
    assert stream(output, encode(BYTES, "the EN")) == ["t", "h", "e", " ", "", "", "EN"]
    assert output.matched_stop is None


@pytest.mark.parametrize(
    ("text", "stops", "want", "matched"),
    [
        ("abcd", ["cd", "b"], "a", "b"),
        ("abcd", ["abcd", "bc"], "a", "bc"),
        ("abcd", ["bc", "abc"], "", "abc"),
        ("aaa", ["aa"], "", "aa"),
        ("xxabab!", ["abab!", "aba"], "xx", "aba"),
    ],
)
def test_the_first_complete_stop_string_wins(
    text: str, stops: list[str], want: str, matched: str
) -> None:
    """Otherwise the result depends on the order of the list or on how tokens cut the text."""
    for parts in ([text], list(text)):
        strings = StopStrings(stops, False)
        assert "".join(map(strings.push, parts)) + strings.finish() == want
        assert strings.matched == matched


@pytest.mark.parametrize(
    ("text", "stops", "min_tokens", "want"),
    [
        ("abcd", ["b"], 1, "a"),
        ("abcd", ["b"], 2, "abcd"),
        ("abab", ["ab"], 2, "ab"),
        ("xaab", ["aab"], 3, "x"),  # begins before and ends behind
        ("abcx", ["abcd", "bc"], 3, "abcx"),  # held back for one, the other has passed
        ("abcd", ["abcd", "bc"], 3, ""),
        ("aaa", ["aa"], 2, "a"),
        ("ab", ["b"], 9, "ab"),
    ],
)
def test_a_stop_string_within_the_first_tokens_is_none(
    text: str, stops: list[str], min_tokens: int, want: str
) -> None:
    """As in vLLM, min_tokens holds for stop strings too, wherever their text is held back."""
    output = OutputText(decoder(BYTES), [], stop=stops, min_tokens=min_tokens)
    assert "".join(stream(output, encode(BYTES, text))) == want
    assert (output.matched_stop is None) == (want == text)


def test_text_after_the_stop_is_dropped() -> None:
    """The token that completes a stop string often carries more; so do tokens in flight."""
    output = OutputText(decoder(MERGED), [], stop=["a"])
    assert output.push(encode(MERGED, "ab")[0]) == ""
    assert output.push(encode(MERGED, "x")[0]) == ""
    assert output.finish() == ""
    assert output.matched_stop == "a"


def test_special_tokens_are_shown_on_demand() -> None:
    """skip_special_tokens = false is how tool parsers see their markers."""
    start = BYTES.token_to_id("<|im_start|>")
    ids = [*encode(BYTES, "a"), start, *encode(BYTES, "b")]
    shown = OutputText(partial(BYTES.decode, skip_special_tokens=False), [])
    assert "".join(stream(shown, ids)) == "a<|im_start|>b"
    assert "".join(stream(OutputText(decoder(BYTES), []), ids)) == "ab"


@settings(max_examples=150, deadline=None)
@given(
    tokenizer=st.sampled_from([BYTES, MERGED, PIECES]),
    prompt=st.text(alphabet="ab €\n", max_size=8),
    text=st.text(alphabet="abEND €ก\n👩", max_size=40),
    stops=st.lists(st.text(alphabet="abEND €\n", min_size=1, max_size=4), max_size=3),
    is_included=st.booleans(),
    min_tokens=st.just(0) | st.integers(0, 45),
)
def test_joined_deltas_are_the_truncated_full_decode(
    tokenizer: Tokenizer,
    prompt: str,
    text: str,
    stops: list[str],
    is_included: bool,
    min_tokens: int,
) -> None:
    """The one property behind all the others: streams show what a look at the whole text would."""
    before = encode(tokenizer, prompt)
    ids = encode(tokenizer, text)
    whole = decode(tokenizer, before + ids)[len(decode(tokenizer, before)) :]
    first = OutputText(decoder(tokenizer), before).push_all(ids[:min_tokens])
    num_protected = len(first) if min_tokens < len(ids) else len(whole)
    want, matched = expected(whole, stops, is_included, num_protected)
    output = OutputText(
        decoder(tokenizer),
        before,
        stop=stops,
        include_stop_str_in_output=is_included,
        min_tokens=min_tokens,
    )
    deltas = stream(output, ids)
    assert "".join(deltas) == want
    assert output.matched_stop == matched


@settings(max_examples=200, deadline=None)
@given(
    tokenizer=st.sampled_from([BYTES, MERGED]),
    ids=st.lists(st.integers(0, 257), max_size=60)
    | st.text(alphabet="abEND €ก\n👩\ufffd").map(lambda text: encode(MERGED, text)),
    num_prompt=st.integers(0, 10),
)
def test_pieces_change_nothing(tokenizer: Tokenizer, ids: list[int], num_prompt: int) -> None:
    """The plain twin of looking texts up, delta by delta, whatever bytes a model emits."""
    texts = [
        stream(OutputText(decoder(tokenizer), ids[:num_prompt], pieces=pieces), ids[num_prompt:])
        for pieces in (None, Pieces(decoder(tokenizer)))
    ]
    assert texts[0] == texts[1]


@settings(max_examples=200, deadline=None)
@given(
    tokenizer=st.sampled_from([BYTES, MERGED, PIECES]),
    text=st.text(alphabet="abEND €ก\n👩\ufffd", max_size=40),
    stop=st.sampled_from([[], ["END"]]),
    sizes=st.lists(st.integers(0, 5), max_size=30),
)
def test_many_tokens_at_once_change_nothing(
    tokenizer: Tokenizer, text: str, stop: list[str], sizes: list[int]
) -> None:
    """The plain twin of making text of several steps' tokens together."""
    ids = encode(tokenizer, text)
    pieces = Pieces(decoder(tokenizer)) if tokenizer is not PIECES else None
    one_by_one, together = (
        OutputText(decoder(tokenizer), [], pieces=pieces, stop=stop) for _ in range(2)
    )
    shown = []
    for size in [*sizes, len(ids)]:
        portion, ids = ids[:size], ids[size:]
        shown.append((together.push_all(portion), "".join(map(one_by_one.push, portion))))
    shown.append((together.finish(), one_by_one.finish()))
    assert [pair[0] for pair in shown] == [pair[1] for pair in shown]


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 255), max_size=60), num_prompt=st.integers(0, 10))
def test_any_bytes_decode_as_a_whole(ids: list[int], num_prompt: int) -> None:
    """A model that emits broken UTF-8 must not make stream and full decode differ."""
    output = OutputText(decoder(BYTES), [])
    assert "".join(stream(output, ids)) == decode(BYTES, ids)
