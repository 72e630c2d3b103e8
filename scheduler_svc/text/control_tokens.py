"""Control tokens in what a client says in a chat are text, not tokens.

Only the template's own words may open and close turns. What a client's message spells like a
control token is marked before the template is rendered, and encoded in two parts afterwards, so
that the tokenizer does not see the token. Messages without such a spelling are left as they are:
their prompt is exactly the plain rendering's.

Control tokens are the tokenizer's special tokens, and the other added tokens that the template
itself writes (DeepSeek's turn markers are of that kind). The latter pass in messages of the
assistant: answers show them as text (`<think>`, `<tool_call>`), and come back with the next turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from tokenizers import AddedToken, Tokenizer, models

# Noncharacters, which no text interchange uses: they enclose a control token that a client wrote.
BEGIN: Final = "\ufdd0"
END: Final = "\ufdd1"
MARKED: Final = re.compile(f"{BEGIN}([^{BEGIN}{END}]*){END}|[{BEGIN}{END}]")

Spans = list[tuple[int, int]]  # begin and end, in characters, in the order of the text
# Texts to ids, each for itself and without the tokens that a prompt begins with.
EncodeAll = Callable[[Sequence[str]], list[list[int]]]


class ControlTokens:
    """Of one tokenizer and its chat template; may be used from several threads."""

    def __init__(self, rust: Tokenizer, template_text: str) -> None:
        """`template_text` is all that the template writes by itself."""
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
        """The messages with every control token enclosed; None when they spell none."""
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
        """Token ids of a rendering of marked messages.

        Raises ValueError when the tokenizer has no other way to write a control token.
        """
        first, *rest = MARKED.split(rendered)  # text, control token or None, text, …
        spelled, texts = rest[::2], rest[1::2]
        as_text = {text: self._as_text(text, encode_all) for text in set(spelled) if text}
        (ids,) = encode_all([first])
        for text, after in zip(spelled, _encode_middles(texts, encode_all), strict=True):
            ids += as_text.get(text or "", [])
            ids += after
        return ids

    def _as_text(self, token: str, encode_all: EncodeAll) -> list[int]:
        """The ids of a control token's text, cut where neither half is a control token."""
        for cut in range(1, len(token)):
            left, right = _encode_middles([token[:cut], token[cut:]], encode_all)
            if self._ids.isdisjoint(left) and self._ids.isdisjoint(right):
                return left + right
        raise ValueError(f"the tokenizer cannot write {token!r} as ordinary text")


class _Finder:
    """Where a text spells any of some tokens, as the tokenizer itself looks for them."""

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


def _encode_middles(texts: Sequence[str], encode_all: EncodeAll) -> list[list[int]]:
    """Ids of texts that stand inside a longer one: behind a newline, so that no tokenizer puts
    the space before them with which it begins a text."""
    (newline,) = encode_all(["\n"])
    size = len(newline)
    behind = encode_all(["\n" + text for text in texts])
    ids = [found[size:] if found[:size] == newline else None for found in behind]
    alone = iter(
        encode_all([text for text, found in zip(texts, ids, strict=True) if found is None])
    )
    return [next(alone) if found is None else found for found in ids]
