"""Keeps control tokens spelled out in a chat from being encoded as tokens.

Only the template may open and close turns. Where a client's text spells a control token, be it in a
message, a tool's definition or a variable, the spelling is marked before the template is rendered,
and encoded in two parts afterwards, so that the tokenizer does not recognise the token. A mark
inside of the spelling keeps it apart even where the template has cut or escaped the others. Chats
without such spellings are left unchanged: their prompt is exactly that of the plain rendering.

Control tokens are the tokenizer's special tokens, and other added tokens that the template itself
writes (such as DeepSeek's turn markers). The latter are allowed in what the assistant said:
answers contain them as text (`<think>`, `<tool_call>`), which comes back with the next turn.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, models

from scheduler_svc.text.chat_template import Chat

# Unicode noncharacters, never used in text interchange: they enclose a spelled control token, and
# part it.
BEGIN: Final = "\ufdd0"
END: Final = "\ufdd1"
BREAK: Final = "\ufdd2"
SEPARATOR: Final = "\n\ufdd3\n"  # in no token
MARKS: Final = re.compile(f"[{BEGIN}{END}{BREAK}]")
MARKED: Final = re.compile(f"{BEGIN}([^{BEGIN}{END}]*){END}|[{BEGIN}{END}{BREAK}]")
SAID: Final = ("content", "reasoning_content")  # by the assistant, in words that it may have made

Spans = list[tuple[int, int]]  # begin and end in characters, in ascending order
# Encodes each text separately, without the tokens that a prompt begins with.
EncodeAll = Callable[[Sequence[str]], list[list[int]]]


class ControlTokens:
    """The control tokens of one tokenizer and its chat template. Thread-safe."""

    def __init__(self, rust: Tokenizer, template_text: str) -> None:
        """`template_text` is every string that the template itself can write."""
        added = rust.get_added_tokens_decoder()
        special = {id: token for id, token in added.items() if token.special}
        written = {
            id: token
            for id, token in added.items()
            if id not in special and token.content in template_text and token.content.strip()
        }
        self._ids = special.keys() | written.keys()
        self._of_assistant = _Finder(rust, special.values())
        self._of_others = _Finder(rust, [*special.values(), *written.values()])

    def mark(self, chat: Chat) -> Chat | None:
        """The chat with every spelled control token marked; None if there is none."""
        said = list(strings_in(_said(chat)))
        others = list(strings_in([_not_said(chat), chat.tools, chat.variables]))
        by_assistant = self._of_assistant.marked(said)
        by_others = self._of_others.marked(others)
        if not any(BREAK in text for text in (*by_assistant.values(), *by_others.values())):
            return None
        messages = []
        for message in chat.messages:
            is_assistant = message["role"] == "assistant"
            said_keys = SAID if is_assistant else ()
            messages.append(
                {
                    key: value
                    if key == "role"
                    else _mapped(value, by_assistant if key in said_keys else by_others)
                    for key, value in message.items()
                }
            )
        return replace(
            chat,
            messages=messages,
            tools=_mapped(chat.tools, by_others),
            variables=_mapped(chat.variables, by_others),
        )

    def encode(self, rendered: str, encode_all: EncodeAll) -> list[int]:
        """Token ids of rendered marked messages.

        Raises ValueError if the tokenizer can only encode the spelling as a control token.
        """
        first, *rest = MARKED.split(rendered)  # text, control token or None, text, …
        spelled = [None if token is None else unmarked(token) for token in rest[::2]]
        texts = rest[1::2]
        as_text = {text: self._as_text(text, encode_all) for text in set(spelled) if text}
        (ids,) = encode_all([first])
        for text, after in zip(spelled, encode_middles(texts, encode_all), strict=True):
            ids += as_text.get(text or "", [])
            ids += after
        return ids

    def _as_text(self, token: str, encode_all: EncodeAll) -> list[int]:
        """Ids of a control token's spelling, split where neither half has a control token."""
        for cut in range(1, len(token)):
            left, right = encode_middles([token[:cut], token[cut:]], encode_all)
            if self._ids.isdisjoint(left) and self._ids.isdisjoint(right):
                return left + right
        raise ValueError(f"the tokenizer cannot encode {token!r} as ordinary text")


class _Finder:
    """Finds tokens spelled in a text, in the way in which the tokenizer itself does."""

    def __init__(self, rust: Tokenizer, tokens: Collection[AddedToken]) -> None:
        self._words = [token.content for token in tokens]
        # Everything between the tokens is one unknown word, 0.
        self._rust = Tokenizer(models.WordLevel(vocab={"": 0}, unk_token=""))
        if any(token.normalized for token in tokens) and rust.normalizer is not None:
            self._rust.normalizer = rust.normalizer
        self._rust.add_special_tokens(
            [
                AddedToken(token.content, normalized=token.normalized, special=True)
                for token in tokens
            ]
        )

    def marked(self, texts: Collection[str]) -> dict[str, str]:
        """Each text, with the spelled tokens marked, and no other marks."""
        plain = {text: unmarked(text) for text in texts}
        found = self._find(list(plain.values()))
        return {
            text: self._enclose(without_marks, found[place]) if place in found else without_marks
            for place, (text, without_marks) in enumerate(plain.items())
        }

    def _find(self, texts: Sequence[str]) -> dict[int, Spans]:
        """By place, the texts that spell tokens. All are read as one: a chat may have millions."""
        found: dict[int, Spans] = {}
        joined = self._rust.encode_batch([SEPARATOR.join(texts)])[0]
        spans = [span for id, span in zip(joined.ids, joined.offsets, strict=True) if id != 0]
        if not spans:
            return found
        sizes = (len(text) + len(SEPARATOR) for text in texts)
        starts = list(itertools.accumulate(sizes, initial=0))
        for begin, end in spans:
            place = bisect_right(starts, begin) - 1
            found.setdefault(place, []).append((begin - starts[place], end - starts[place]))
        return found

    def _enclose(self, text: str, spans: Spans) -> str:
        pieces = []
        done = 0
        for begin, end in spans:
            cut = begin + self._cut(text[begin:end])
            pieces += [text[done:begin], BEGIN, text[begin:cut], BREAK, text[cut:end], END]
            done = end
        return "".join([*pieces, text[done:]])

    def _cut(self, token: str) -> int:
        """Where neither half has a token, if there is such a place."""
        for cut in range(1, len(token)):
            if not any(word in token[:cut] or word in token[cut:] for word in self._words):
                return cut
        return 1


def _said(chat: Chat) -> Iterator[Any]:
    """What the assistant said."""
    for message in chat.messages:
        if message["role"] == "assistant":
            yield from (message[key] for key in SAID if key in message)


def _not_said(chat: Chat) -> Iterator[Any]:
    for message in chat.messages:
        is_assistant = message["role"] == "assistant"
        skipped = ("role", *SAID) if is_assistant else ("role",)  # whose letters are restricted
        yield from (value for key, value in message.items() if key not in skipped)


def strings_in(value: Any) -> Iterator[str]:
    """All texts in JSON values, keys included, in any order."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            left += value
            left += value.values()
        elif value is not None and not isinstance(value, int | float):
            left += value


def _mapped(value: Any, by: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return by[value]
    if isinstance(value, Mapping):
        return {by[key]: _mapped(item, by) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, by) for item in value]
    return value


def unmarked(text: str) -> str:
    return MARKS.sub("", text)


def encode_middles(texts: Sequence[str], encode_all: EncodeAll) -> list[list[int]]:
    """Ids of texts in the middle of a longer one: encoded after a newline, so that no tokenizer
    inserts the space with which it begins a text."""
    (newline,) = encode_all(["\n"])
    size = len(newline)
    behind = encode_all(["\n" + text for text in texts])
    ids = [found[size:] if found[:size] == newline else None for found in behind]
    alone = iter(
        encode_all([text for text, found in zip(texts, ids, strict=True) if found is None])
    )
    return [next(alone) if found is None else found for found in ids]
