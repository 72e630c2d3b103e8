"""Keeps control tokens spelled out in chat messages from being encoded as tokens.

Only the template may open and close turns. Where a client's message spells a control token, the
spelling is marked before the template is rendered, and encoded in two parts afterwards, so that the
tokenizer does not recognise the token. Messages without such spellings are left unchanged: their
prompt is exactly that of the plain rendering.

Control tokens are the tokenizer's special tokens, and other added tokens that the template itself
writes (such as DeepSeek's turn markers). The latter are allowed in messages of the assistant:
answers contain them as text (`<think>`, `<tool_call>`), which comes back with the next turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from tokenizers import AddedToken, Tokenizer, models

# Unicode noncharacters, never used in text interchange: they enclose a spelled control token.
BEGIN: Final = "\ufdd0"
END: Final = "\ufdd1"
MARKED: Final = re.compile(f"{BEGIN}([^{BEGIN}{END}]*){END}|[{BEGIN}{END}]")

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

    def mark(self, messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]] | None:
        """The messages with every spelled control token enclosed; None if there is none."""
        contents = [unmarked(message["content"]) for message in messages]
        spans: dict[int, Spans] = {}
        for is_assistant, finder in ((True, self._of_assistant), (False, self._of_others)):
            places = [
                place
                for place, message in enumerate(messages)
                if (message["role"] == "assistant") is is_assistant
            ]
            found = finder.find([contents[place] for place in places])
            spans.update(zip(places, found, strict=True))
        if not any(spans.values()):
            return None
        return [
            {**message, "content": _enclose(contents[place], spans[place])}
            for place, message in enumerate(messages)
        ]

    def encode(self, rendered: str, encode_all: EncodeAll) -> list[int]:
        """Token ids of rendered marked messages.

        Raises ValueError if the tokenizer can only encode the spelling as a control token.
        """
        first, *rest = MARKED.split(rendered)  # text, control token or None, text, …
        spelled, texts = rest[::2], rest[1::2]
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

    def find(self, texts: Sequence[str]) -> list[Spans]:
        return [
            [span for id, span in zip(found.ids, found.offsets, strict=True) if id != 0]
            for found in self._rust.encode_batch(list(texts))
        ]


def _enclose(text: str, spans: Spans) -> str:
    pieces = []
    done = 0
    for begin, end in spans:
        pieces += [text[done:begin], BEGIN, text[begin:end], END]
        done = end
    return "".join([*pieces, text[done:]])


def unmarked(text: str) -> str:
    return text.replace(BEGIN, "").replace(END, "")


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
