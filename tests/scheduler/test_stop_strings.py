"""Stop strings that spell special tokens, which the text leaves out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from protos import inference_pb2 as pb
from scheduler_svc.front.served_model import Model
from scheduler_svc.front.validation import validate
from scheduler_svc.text.tokenizer import Tokenizer
from tests.support.fake_engine import FACTS
from tests.support.small_tokenizers import byte_level, chat

RUST = byte_level()
MODEL = Model.of("tiny", FACTS, Tokenizer(chat()))
START, END = (RUST.token_to_id(word) for word in ("<|im_start|>", "<|im_end|>"))


def tokens(*parts: str | int) -> list[int]:
    """Texts as ordinary tokens, letter by letter, and ids."""
    ids: list[int] = []
    for part in parts:
        letters = [part] if isinstance(part, int) else part
        for letter in letters:
            ids += [letter] if isinstance(letter, int) else RUST.encode(letter).ids
    return ids


def read(
    ids: Sequence[int], stops: Sequence[str], is_included: bool = False, min_tokens: int = 0
) -> tuple[str, str | None, int]:
    """The text, the stop string that ended it, and after how many tokens."""
    sampling = pb.SamplingParams(
        stop=stops,
        ignore_eos=True,
        include_stop_str_in_output=is_included,
        min_tokens=min_tokens,
    )
    request = pb.GenerateRequest(text="p", sampling=sampling)
    text = validate(request, "r", 0, MODEL, 8).texts[0]
    shown = ""
    for place, token_id in enumerate(ids, 1):
        shown += text.push(token_id)
        if text.matched_stop is not None:
            return shown, text.matched_stop, place
    shown += text.finish()
    return shown, text.matched_stop, len(ids)


@pytest.mark.parametrize(
    ("stop", "ids", "text", "place"),
    [
        ("<|im_end|>", tokens("ab", END, "c"), "ab", 3),
        ("<|im_end|>\n", tokens("ab", END, "x", END, "\nc"), "abx", 6),
        ("b<|im_end|>", tokens("a", END, "ab", END, "c"), "aa", 5),
        ("a<|im_end|>b", tokens("a", END, END, "a", END, "bc"), "a", 6),
        ("<|im_end|>\n<|im_start|>", tokens("a", END, "\n", START, "u"), "a", 4),
        ("<|im_end|><|im_end|>", tokens("a", END, "b", END, END), "ab", 5),
        ("<|im_end|>", tokens("a", "<|im_end|>"), "a", 11),  # spelled in ordinary tokens
        ("<|im_end|>", tokens("é"[:1], END), "é", 3),
    ],
)
def test_a_special_token_in_a_stop_string_stops(
    stop: str, ids: list[int], text: str, place: int
) -> None:
    """The text leaves it out, so a search in the text runs on to max_tokens without a word."""
    assert read(ids, [stop]) == (text, stop, place)
    assert read(ids, ["nowhere", stop]) == (text, stop, place)
    assert read(ids, [stop], is_included=True) == (text + stop, stop, place)


def test_no_special_token_is_shown_while_none_stops() -> None:
    """skip_special_tokens still holds for all that is no stop."""
    stops = ["<|im_end|>\nUser:"]
    assert read(tokens("a", START, "b", END, "\nUse", END, "c"), stops) == ("ab\nUsec", None, 10)
    assert read(tokens("a", END), stops) == ("a", None, 2)
    assert read(tokens("a", END, "\nU"), stops, is_included=True) == ("a\nU", None, 4)


def test_ordinary_stop_strings_beside_it_are_found_in_the_text_that_is_shown() -> None:
    """A stop string that a hidden token interrupts would be shown whole."""
    stops = ["<|im_end|>!", "ab"]
    assert read(tokens("xa", END, "b", END, "!"), stops) == ("x", "ab", 4)
    assert read(tokens("xab", END, "!"), stops) == ("x", "ab", 3)
    assert read(tokens("xa", END, "!b"), stops) == ("xa", "<|im_end|>!", 4)
    assert read(tokens("xa", END, "b"), stops, is_included=True) == ("xab", "ab", 4)


def test_the_first_tokens_end_nothing() -> None:
    """Hidden tokens count, and what they interrupt was said when it was said."""
    stops = ["<|im_end|>!", "ab"]
    assert read(tokens("a", END, "b", END, "!"), stops, min_tokens=3) == ("ab", "<|im_end|>!", 5)
    assert read(tokens("a", END, "!b", END, "!"), stops, min_tokens=3) == ("a!b", "<|im_end|>!", 6)
    # "ab" is shown only after the token behind it, as it may begin "ab<|im_end|>c"
    stops = ["ab<|im_end|>c", "ab"]
    assert read(tokens("a", START, "b", END, "x"), stops, min_tokens=3) == ("abx", None, 5)
    assert read(tokens("a", "b", END, "x"), stops, min_tokens=2) == ("abx", None, 4)
    assert read(tokens("a", "b", END, "c"), stops, min_tokens=2) == ("", "ab<|im_end|>c", 4)


def test_with_special_tokens_shown_the_text_has_them() -> None:
    """Then nothing is hidden, and the search in the text is right."""
    sampling = pb.SamplingParams(stop=["<|im_end|>"], skip_special_tokens=False)
    request = pb.GenerateRequest(text="p", sampling=sampling)
    text = validate(request, "r", 0, MODEL, 8).texts[0]
    assert "".join(map(text.push, tokens("a", START, END, "b"))) == "a<|im_start|>"
    assert text.matched_stop == "<|im_end|>"
