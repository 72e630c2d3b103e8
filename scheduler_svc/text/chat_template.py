"""A model's chat template: messages in, text out.

Templates come with a model and are rendered in a sandbox, as transformers renders them. If one
fails, the model or the messages are the cause, never Chairlift, so its error is reported to the
client. The output is read piece by piece, and rendering stops when it is too long for a prompt: a
template may loop forever, or take time quadratic in the number of messages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from jinja2 import TemplateError, TemplateSyntaxError, nodes

from scheduler_svc.errors import RequestRejected

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_RENDER_SECONDS: Final = 10.0


class NoChatTemplate(ValueError):
    """The model has no usable template; `str()` says why."""


class ChatTemplate:
    """Thread-safe."""

    def __init__(self, wrapped: PreTrainedTokenizerFast) -> None:
        """Raises NoChatTemplate."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        source = wrapped.chat_template
        if isinstance(source, dict):
            names = ", ".join(source) or "none"
            source = source.get("default")
            if source is None:
                raise NoChatTemplate(f"this model has templates, but no default one: {names}")
        if source is None:
            raise NoChatTemplate("this model has no template")
        if not isinstance(source, str):
            raise NoChatTemplate(f"this model's template is not a string but {source!r:.100}")
        try:
            self._template = _compile_jinja_template(source)
            parsed = self._template.environment.parse(source)
        except TemplateSyntaxError as error:
            raise NoChatTemplate(
                f"this model's template cannot be read: line {error.lineno}: {error}"
            ) from error
        self._special_tokens = dict(wrapped.special_tokens_map)
        self.own_text = "\0".join(_literals(parsed, self._special_tokens))

    def render(self, messages: Sequence[Mapping[str, str]], max_chars: int) -> str:
        """The prompt up to where the answer begins. Raises RequestRejected when the template fails
        or writes more than `max_chars`."""
        pieces = []
        num_chars = 0
        deadline = time.monotonic() + MAX_RENDER_SECONDS
        try:
            for piece in self._pieces(messages):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > max_chars or time.monotonic() > deadline:
                    break
            else:
                return "".join(pieces)
        except Exception as error:  # a template can raise anything, as Python code can
            is_readable = isinstance(error, TemplateError)
            reason = str(error) if is_readable else f"{type(error).__name__}: {error}"
            raise RequestRejected(
                "chat.messages",
                _roles(messages),
                f"what the model's chat template accepts ({reason})",
            ) from error
        raise RequestRejected(
            "chat.messages",
            _roles(messages),
            f"messages that the model's chat template renders to at most {max_chars} characters "
            f"within {MAX_RENDER_SECONDS:g} s",
        )

    def _pieces(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        pieces: Iterator[str] = self._template.generate(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **self._special_tokens,
        )
        return pieces


def _roles(messages: Sequence[Mapping[str, str]]) -> str:
    return ", ".join(message["role"] for message in messages[:8])


def _literals(parsed: nodes.Template, special_tokens: Mapping[str, str]) -> Iterator[str]:
    """Every string that the template writes or compares with."""
    yield from (node.data for node in parsed.find_all(nodes.TemplateData))
    for node in parsed.find_all(nodes.Const):
        if isinstance(node.value, str):
            yield node.value
    yield from map(str, special_tokens.values())
