"""Cuts an answer's text at a stop string.

`StopStrings` works on the text alone. With skip_special_tokens the text lacks special tokens, so a
stop string that spells one could never match: `HiddenTokens` inserts a mark for each such token,
searches for stop strings written with marks, and removes the marks again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final

# Lone surrogates: no decoder makes them, and no protobuf string can hold them.
FIRST_MARK: Final = 0xD800
MAX_MARKS: Final = 0x800


class StopStrings:
    """Cuts text before (or after) the first stop string.

    The first is the one that is complete first, and of those that end together the longest: that
    depends on the text alone, never on its division into tokens. Only the longest suffix of the
    text that is a prefix of a stop string is held back. Protected text may begin a match, but no
    match ends in it; all of it comes before the rest.
    """

    __slots__ = (
        "_held", "_is_included", "_longest", "_num_protected", "_sorted", "_stops", "matched"
    )  # fmt: skip

    def __init__(self, stops: Sequence[str], is_included: bool) -> None:
        self._stops = tuple(stops)
        self._sorted = sorted(stops)
        self._longest = max(map(len, stops), default=0)
        self._is_included = is_included
        self._held = ""
        self._num_protected = 0  # characters of the held text, and of text to be pushed
        self.matched: str | None = None

    def protect(self, text: str) -> None:
        """No match ends in this text, which is to be pushed next."""
        self._num_protected += len(text)

    def push(self, text: str) -> str:
        if self.matched is not None:
            return ""
        # No match begins before the held text, as nothing before it begins a stop string.
        text = self._held + text
        first_end = self._num_protected + 1
        found = [(start + len(stop), start, stop) for stop in self._stops
                 if (start := text.find(stop, max(0, first_end - len(stop)))) >= 0]  # fmt: skip
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._is_included else start]
        num_shown = len(text) - self._num_held(text)
        self._held = text[num_shown:]
        self._num_protected = max(0, self._num_protected - num_shown)
        return text[:num_shown]

    def finish(self) -> str:
        """The held text, which turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            # if any stop string begins with `end`, so does the first one that is not less
            place = bisect_left(self._sorted, end)
            if place < len(self._sorted) and self._sorted[place].startswith(end):
                return length
        return 0


class HiddenTokens:
    """StopStrings for text that lacks tokens which a stop string spells.

    A stop string matches as ordinary text, or with all its special tokens as tokens.
    """

    __slots__ = ("_is_included", "_original", "_seen", "_shown", "_unmark", "marks", "matched")

    def __init__(self, stops: Sequence[str], hidden: Mapping[int, str], is_included: bool) -> None:
        """`hidden`: the spelling of each token that the text lacks and a stop string contains."""
        longest_first = sorted(hidden, key=lambda token_id: -len(hidden[token_id]))[:MAX_MARKS]
        # `push` expects these in the text in place of the tokens
        self.marks = {token_id: chr(FIRST_MARK + i) for i, token_id in enumerate(longest_first)}
        self.matched: str | None = None
        self._is_included = is_included
        self._unmark = {ord(mark): "" for mark in self.marks.values()}
        self._original = {stop: stop for stop in stops}
        for stop in stops:
            marked = stop
            for token_id, mark in self.marks.items():
                marked = marked.replace(hidden[token_id], mark)
            self._original.setdefault(marked, stop)
        self._seen = StopStrings(list(self._original), is_included)
        # also finds stop strings that a hidden token interrupts, as the client sees them whole
        self._shown = StopStrings(stops, is_included)

    def protect(self, text: str) -> None:
        """No match ends in this text, which is to be pushed next."""
        self._seen.protect(text)
        self._shown.protect(text.translate(self._unmark))

    def push(self, text: str) -> str:
        return self._show(self._seen.push(text))

    def finish(self) -> str:
        shown = self._show(self._seen.finish())
        return shown if self.matched is not None else shown + self._shown.finish()

    def _show(self, text: str) -> str:
        if self.matched is not None:
            return ""
        found, stop = self._seen.matched, ""
        if found is not None and self._is_included:
            text, stop = text.removesuffix(found), self._original[found]
        shown = self._shown.push(text.translate(self._unmark))
        if self._shown.matched is not None:
            self.matched = self._shown.matched
        elif found is not None:
            self.matched = self._original[found]
            shown += self._shown.finish() + stop
        return shown
