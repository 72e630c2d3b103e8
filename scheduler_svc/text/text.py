"""Output text of one request: tokens in, text for the client out.

Two stages: `Detokenizer` turns tokens into whole characters; `StopStrings` (stop_strings.py) holds
back a possible stop string and cuts the text where one is complete. `OutputText` combines them. All
output text passes through here, streamed or not, so both are equal byte for byte.

Method: decode a short window of the latest tokens again with each new one and return the text it
adds, except trailing U+FFFD, which stands for an unfinished character. The context before the new
tokens keeps decoders that treat the first token differently (stripping a leading space) from doing
so in mid-text; at the start that context is the prompt's tail. tokenizers' own DecodeStream works
similarly in half the time (2 µs per token), but repeats part of a prompt that ends inside a
character, and fails permanently once a byte-fallback decoder changes earlier text.

Byte-level decoders only join the bytes of their tokens (`Pieces`). There the text of a token is
looked up, and only an unfinished character is decoded again: a tenth of the time.

The price: where a byte-fallback model breaks off a character *after* whole characters of the same
run of byte tokens, a full decode turns all of that run into U+FFFD, but the text already returned
stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from scheduler_svc.text.stop_strings import HiddenTokens, StopStrings

REPLACEMENT: Final = "\ufffd"  # how decoders show bytes that do not form a character (yet)

CONTEXT_TOKENS: Final = 6  # tokens kept before the new ones
MAX_CONTEXT_TOKENS: Final = 24  # of a prompt, if fewer would begin inside a character
MAX_HELD_TOKENS: Final = 256  # without a whole character: it will not become one, return it

Decode = Callable[[list[int]], str]


class Pieces(dict[int, str]):
    """The text of each token, for decoders whose text of many tokens is these joined (unless a
    character is cut): byte-level ones, but not those that treat a first token differently."""

    def __init__(self, decode: Decode) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, token_id: int) -> str:
        piece = self[token_id] = self._decode([token_id])
        return piece


class Detokenizer:
    """Turns tokens into characters, each as soon as it is complete.

    `decode` must be a function of the tokens alone; `prompt_token_ids` precede the output. The
    texts of all pushes and of `finish`, joined, are what the output adds to the decoded prompt.
    """

    __slots__ = ("_context", "_decode", "_pieces", "_shown", "_window")

    def __init__(
        self, decode: Decode, prompt_token_ids: Sequence[int], pieces: Pieces | None = None
    ) -> None:
        self._decode = decode
        self._pieces = pieces
        self._window = _clean_tail(decode, prompt_token_ids)
        self._context = len(self._window)  # tokens whose text has been returned; next cut
        self._shown = decode(self._window)  # text of the window that has been returned
        if pieces is not None and not self._shown.endswith(REPLACEMENT):
            self._forget_window()

    def push(self, token_id: int) -> str:
        if self._pieces is not None and not self._window:
            piece = self._pieces[token_id]
            if REPLACEMENT not in piece:
                return piece
        self._window.append(token_id)
        text = self._decode(self._window)
        whole = text.rstrip(REPLACEMENT)
        num_new = len(self._window) - self._context
        if num_new > MAX_HELD_TOKENS:
            whole = text
        added = self._show(whole)
        if len(whole) < len(text):
            return added
        if self._pieces is not None:
            self._forget_window()
        elif num_new >= CONTEXT_TOKENS:
            del self._window[: self._context]
            self._context = len(self._window)
            self._shown = self._decode(self._window)
        return added

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Same as pushing them one by one; faster where they are looked up."""
        if self._pieces is not None and not self._window:
            text = "".join(map(self._pieces.__getitem__, token_ids))
            if REPLACEMENT not in text:
                return text
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        return self._show(self._decode(self._window))

    def _forget_window(self) -> None:
        """Later text does not depend on the tokens so far."""
        self._window = []
        self._context = 0
        self._shown = ""

    def _show(self, text: str) -> str:
        # If the prompt ended inside a character, the output may have completed it.
        shown = self._shown if text.startswith(self._shown) else self._shown.rstrip(REPLACEMENT)
        if len(text) <= len(shown):
            return ""
        self._shown = text
        return text[len(shown) :]


def _clean_tail(decode: Decode, token_ids: Sequence[int]) -> list[int]:
    """The last few tokens; more of them if those would begin inside a character."""
    tail: list[int] = []
    for length in range(CONTEXT_TOKENS, MAX_CONTEXT_TOKENS + 1):
        tail = list(token_ids[-length:])
        if len(tail) < length or not decode(tail).startswith(REPLACEMENT):
            break
    return tail


class OutputText:
    """Turns the tokens of one request, or sibling, into text. For one thread, the engine's."""

    __slots__ = (
        "_detokenizer", "_marks", "_num_protected", "_stops", "include_stop_str_in_output",
        "matched_stop",
    )  # fmt: skip

    def __init__(
        self,
        decode: Decode,
        prompt_token_ids: Sequence[int],
        *,
        pieces: Pieces | None = None,
        stop: Sequence[str] = (),
        hidden: Mapping[int, str] | None = None,
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`hidden`: by id, the tokens that `decode` omits and a stop string spells. A stop string
        that ends within the text of the first `min_tokens` tokens is none."""
        self.include_stop_str_in_output = include_stop_str_in_output  # and a stop token's text
        self.matched_stop: str | None = None  # once one is found, pushes add nothing
        self._num_protected = min_tokens  # tokens still to come
        self._detokenizer = Detokenizer(decode, prompt_token_ids, pieces)
        self._marks: Mapping[int, str] = {}
        self._stops: StopStrings | HiddenTokens | None = None
        if hidden:
            self._stops = HiddenTokens(stop, hidden, include_stop_str_in_output)
            self._marks = self._stops.marks
        elif stop:
            self._stops = StopStrings(stop, include_stop_str_in_output)

    @property
    def seeks_stop(self) -> bool:
        """Any token may end the request, so each must be pushed when it arrives."""
        return self._stops is not None

    def push(self, token_id: int) -> str:
        """The text to show after this token: whole characters, no part of a stop string."""
        if self.matched_stop is not None:
            return ""
        text = self._detokenizer.push(token_id)
        if self._stops is None:
            return text
        if token_id in self._marks:
            text += self._marks[token_id]
        if self._num_protected > 0:
            self._stops.protect(text)
        self._num_protected -= 1
        shown = self._stops.push(text)
        self.matched_stop = self._stops.matched
        return shown

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Same as pushing them one by one."""
        if self._stops is None:
            return self._detokenizer.push_all(token_ids)
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        """The text still held back; no further token comes."""
        if self.matched_stop is not None:
            return ""
        text = self._detokenizer.finish()
        if self._stops is None:
            return text
        if self._num_protected >= 0:  # what the last of these tokens left unfinished
            self._stops.protect(text)
        shown = self._stops.push(text) + self._stops.finish()
        self.matched_stop = self._stops.matched
        return shown
