"""Lines typed by a person, with editing and history where there is a terminal.

Needs prompt_toolkit (the extra `cli`) for editing; without it, or without a terminal, lines come
from input(). A line that ends with a backslash goes on in the next one, in both.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

_PROMPT = "> "
_CONTINUATION = "… "


class LineInput(Protocol):
    """Where lines come from."""

    def read(self) -> str:
        """The next message, which may have several lines. EOFError at the end, KeyboardInterrupt
        if what was being typed is to be dropped."""
        ...


def line_input(history: Path | None, words: Sequence[str]) -> LineInput:
    """The input that suits the standard streams. `history` is the file of earlier lines, `words`
    are completed by Tab."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _Plain()
    if importlib.util.find_spec("prompt_toolkit") is None:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # editing, but no history across sessions
        return _Plain()
    return _Edited(history, words)


def state_folder() -> Path:
    """Where this user's history is kept: $XDG_STATE_HOME/chairlift."""
    home = os.environ.get("XDG_STATE_HOME", "")
    # relative paths are to be ignored, says the XDG base directory specification
    base = Path(home) if os.path.isabs(home) else Path.home() / ".local" / "state"
    return base / "chairlift"


class _Plain:
    def read(self) -> str:
        prompt = _PROMPT if sys.stdin.isatty() else ""
        lines = [input(prompt)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(input(_CONTINUATION if prompt else ""))
            except EOFError:
                break
        return "\n".join(lines)


class _Edited:
    def __init__(self, history: Path | None, words: Sequence[str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        past = FileHistory(str(history)) if _can_be_written(history) else InMemoryHistory()
        self._session: Any = PromptSession(
            history=past,
            multiline=True,  # so that a paste of several lines is one message
            key_bindings=_keys(),
            completer=WordCompleter(list(words), sentence=True),
            complete_while_typing=Condition(
                lambda: self._session.default_buffer.text.startswith("/")
            ),
            enable_open_in_editor=True,
            prompt_continuation=_CONTINUATION,
        )

    def read(self) -> str:
        return str(self._session.prompt(_PROMPT))


def _keys() -> Any:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _can_be_written(path: Path | None) -> bool:
    if path is None:
        return False
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:  # a home that is read-only: no history
        return False
    return True
