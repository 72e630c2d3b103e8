"""A model's chat template: messages, tools and variables in, text out.

Templates come with a model and are rendered in a sandbox, as transformers renders them. If one
fails, the model or the messages are the cause, never Chairlift, so its error is reported to the
client. The output is read piece by piece, and rendering stops when it is too long for a prompt: a
template may loop forever, or take time quadratic in the number of messages.

One thing differs from transformers: a template that would print a list of content parts as Python
does gets their texts joined by line breaks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError, TemplateSyntaxError, nodes

from scheduler_svc.errors import RequestRejected

if TYPE_CHECKING:
    from jinja2 import Template
    from transformers import PreTrainedTokenizerFast

MAX_RENDER_SECONDS: Final = 10.0
GIVEN: Final = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
SPECIAL_TOKENS: Final = frozenset(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
END_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' own; its last space tells trimming
PROBE: Final = "a text that no template has"
MAX_PROBE_CHARS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Chat:
    """What a template is given; JSON values."""

    messages: Sequence[Mapping[str, Any]]  # role, content (a text or text parts) and others
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # leave the last message open


class NoChatTemplate(ValueError):
    """The model has no usable template; `str()` says why."""


class ChatTemplate:
    """Thread-safe."""

    def __init__(self, wrapped: PreTrainedTokenizerFast) -> None:
        """Raises NoChatTemplate."""
        source = wrapped.chat_template
        named = source if isinstance(source, dict) else {"default": source}
        if "default" not in named:
            names = ", ".join(named) or "none"
            raise NoChatTemplate(f"this model has templates, but no default one: {names}")
        self._special_tokens = dict(wrapped.special_tokens_map)
        self._reserved = GIVEN | SPECIAL_TOKENS | self._special_tokens.keys()
        self._default = _Source(named["default"])
        self._with_tools = _Source(named["tool_use"]) if "tool_use" in named else self._default
        literals = [*self._default.literals(), *self._with_tools.literals()]
        self.own_text = "\0".join([*literals, *map(str, self._special_tokens.values())])

    def _reads_parts(self, source: _Source) -> bool:
        """Whether the template takes the text out of a list of content parts."""
        if source.reads_parts is None:
            source.reads_parts = self._probe(source)
        return source.reads_parts

    def _probe(self, source: _Source) -> bool:
        message = {"role": "user", "content": [{"type": "text", "text": PROBE}]}
        try:
            text = self._rendered(source, Chat([message]), MAX_PROBE_CHARS)
        except RequestRejected:  # it cannot add a list to a text, say
            return False
        return PROBE in text and f"'{PROBE}'" not in text and f'"{PROBE}"' not in text

    def render(self, chat: Chat, max_chars: int) -> str:
        """The prompt up to where the answer begins. Raises RequestRejected when the template fails
        or writes more than `max_chars`, and for variables with reserved names."""
        for name in chat.variables:
            if name in self._reserved:
                raise RequestRejected(
                    "chat.chat_template_kwargs",
                    name,
                    f"names other than {', '.join(sorted(self._reserved))}",
                )
        source = self._default if chat.tools is None else self._with_tools
        has_parts = any(not isinstance(message["content"], str) for message in chat.messages)
        if has_parts and not self._reads_parts(source):
            chat = replace(chat, messages=[_joined(message) for message in chat.messages])
        if chat.continue_final_message:
            return self._unfinished(source, chat, max_chars)
        return self._rendered(source, chat, max_chars)

    def _unfinished(self, source: _Source, chat: Chat, max_chars: int) -> str:
        """The prompt up to the end of the last message, found by a tag behind it. As transformers:
        where the template trims the message, all white space before the tag is."""
        *others, last = chat.messages
        text = _last_text(last)
        if text is None or "content" not in source.text:
            raise _no_text_to_continue("a last message with a text, and a template that reads it")
        tagged = replace(chat, messages=[*others, _with_tag(last)])
        rendered = self._rendered(source, tagged, max_chars)
        begin = rendered.rfind(END_TAG.strip())
        if begin < 0 or text.strip() not in rendered:
            raise _no_text_to_continue("a last message that the model's template shows as it is")
        if rendered.startswith(END_TAG, begin):
            return rendered[:begin]
        return rendered[:begin].rstrip()

    def _rendered(self, source: _Source, chat: Chat, max_chars: int) -> str:
        pieces = []
        num_chars = 0
        deadline = time.monotonic() + MAX_RENDER_SECONDS
        try:
            for piece in self._pieces(source, chat):
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
                _roles(chat.messages),
                f"what the model's chat template accepts ({reason})",
            ) from error
        raise RequestRejected(
            "chat.messages",
            _roles(chat.messages),
            f"messages that the model's chat template renders to at most {max_chars} characters "
            f"within {MAX_RENDER_SECONDS:g} s",
        )

    def _pieces(self, source: _Source, chat: Chat) -> Iterator[str]:
        given: dict[str, Any] = {
            "documents": None,
            **chat.variables,
            **self._special_tokens,
            "messages": [_with_thinking(message) for message in chat.messages],
            "tools": None if chat.tools is None else list(chat.tools),
            "add_generation_prompt": chat.add_generation_prompt,
        }
        pieces: Iterator[str] = source.template.generate(**given)
        return pieces


class _Source:
    """One compiled template."""

    def __init__(self, text: object) -> None:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        if text is None:
            raise NoChatTemplate("this model has no template")
        if not isinstance(text, str):
            raise NoChatTemplate(f"this model's template is not a string but {text!r:.100}")
        self.text = text
        self.reads_parts: bool | None = None  # None: not known yet
        try:
            self.template: Template = _compile_jinja_template(text)
            self._parsed = self.template.environment.parse(text)
        except TemplateSyntaxError as error:
            raise NoChatTemplate(
                f"this model's template cannot be read: line {error.lineno}: {error}"
            ) from error

    def literals(self) -> Iterator[str]:
        """Every string that the template writes or compares with."""
        yield from (node.data for node in self._parsed.find_all(nodes.TemplateData))
        for node in self._parsed.find_all(nodes.Const):
            if isinstance(node.value, str):
                yield node.value


def _with_thinking(message: Mapping[str, Any]) -> dict[str, Any]:
    """Templates read the reasoning under either name."""
    reasoning = message.get("reasoning_content")
    return dict(message) if reasoning is None else {"thinking": reasoning, **message}


def _joined(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _last_text(message: Mapping[str, Any]) -> str | None:
    content = message["content"]
    if isinstance(content, str):
        return content
    return content[-1]["text"] if content else None


def _with_tag(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the end of its text marked."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + END_TAG}
    *others, last = content
    return {**message, "content": [*others, {**last, "text": last["text"] + END_TAG}]}


def _no_text_to_continue(allowed: str) -> RequestRejected:
    return RequestRejected("chat.continue_final_message", True, f"{allowed}; or false")


def _roles(messages: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(message["role"] for message in messages[:8])
