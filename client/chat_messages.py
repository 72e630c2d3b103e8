"""Chat messages: as ChatMessage, or as mappings in the shape of OpenAI's API.

[{"role": "system", "content": "Be brief."},
 {"role": "user", "content": [{"type": "text", "text": "What is the weather in Oslo?"}]},
 {"role": "assistant", "tool_calls": [{"id": "1", "type": "function",
     "function": {"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}}]},
 {"role": "tool", "tool_call_id": "1", "content": "Rain"}]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from client.fields import assign_field, quoted
from protos import inference_pb2


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asked for."""

    id: str
    name: str
    arguments: str  # a JSON object


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; `role` is one of the model's chat template: system, user,
    assistant, tool."""

    role: str
    content: str | Sequence[str | Mapping[str, Any]] = ""  # text, or text parts
    name: str = ""  # of the participant, or of the tool that answers
    tool_calls: Sequence[ToolCall | Mapping[str, Any]] = ()  # of an assistant message
    tool_call_id: str = ""  # of a tool message: the call that it answers
    reasoning_content: str = ""  # of an assistant message


Chat = Sequence[ChatMessage | Mapping[str, Any]]


class ChatOptions(TypedDict, total=False):
    """What the model's chat template is told beside the messages. None means not given."""

    tools: Sequence[Mapping[str, Any]] | None  # definitions, as in OpenAI's API
    chat_template_kwargs: Mapping[str, Any] | None  # further variables: enable_thinking, …
    add_generation_prompt: bool | None
    continue_final_message: bool | None  # the answer goes on with the last message's text


_KEYS: Final = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
_STRINGS: Final = ("role", "name", "tool_call_id", "reasoning_content")


def chat_messages(chat: Chat, options: ChatOptions | None = None) -> inference_pb2.ChatMessages:
    """The message for a conversation. TypeError or ValueError names what does not fit."""
    messages = inference_pb2.ChatMessages()
    for index, given in enumerate(chat):
        _add_message(messages.messages.add(), f"chat message {index}", given)
    for name, value in (options or {}).items():
        if value is None:
            continue
        if name == "tools":
            messages.tools.extend(_json_object("tool", tool) for tool in _list("tools", value))
        elif name == "chat_template_kwargs":
            messages.chat_template_kwargs = _json_object(name, value)
        else:
            assign_field(messages, name, value)
    return messages


def _add_message(message: inference_pb2.ChatMessage, place: str, given: Any) -> None:
    if isinstance(given, ChatMessage):
        values = {key: getattr(given, key) for key in _KEYS}
    elif isinstance(given, Mapping):
        # clients of OpenAI's API print what a message lacks as null
        values = {key: value for key, value in given.items() if value is not None}
    else:
        raise TypeError(
            f"{place} is {quoted(given)}; allowed: a ChatMessage, or a mapping with the keys "
            f"{', '.join(_KEYS)}"
        )
    unknown = [key for key in values if key not in _KEYS]
    if unknown:
        raise TypeError(
            f"{place} is {quoted(given)}; {unknown[0]!r} is unknown; allowed: {', '.join(_KEYS)}"
        )
    if "role" not in values or not ("content" in values or values.get("tool_calls")):
        raise TypeError(f"{place} is {quoted(given)}; it needs role, and content or tool_calls")
    for key in _STRINGS:
        if not isinstance(values.get(key, ""), str):
            raise TypeError(f"{place} is {quoted(given)}; {key} must be a string")
        assign_field(message, key, values.get(key, ""))
    _set_content(message, place, values.get("content", ""))
    for call in _list(f"tool_calls of {place}", values.get("tool_calls", ())):
        _add_tool_call(message.tool_calls.add(), place, call)


def _set_content(message: inference_pb2.ChatMessage, place: str, content: Any) -> None:
    if isinstance(content, str):
        assign_field(message, "content", content)
        return
    if not isinstance(content, Sequence):
        raise TypeError(
            f"{place} is {quoted(content)}; content must be a string or a list of text parts"
        )
    for part in content:
        is_text = isinstance(part, Mapping) and part.get("type", "text") == "text"
        text = part.get("text") if is_text else part
        if not isinstance(text, str):
            raise TypeError(
                f"{place} is {quoted(content)}; its part {quoted(part)} is not allowed: only "
                '{"type": "text", "text": "…"}'
            )
        assign_field(message.parts.add(), "text", text)


def _add_tool_call(call: inference_pb2.ToolCall, place: str, given: Any) -> None:
    if isinstance(given, ToolCall):
        values: dict[str, Any] = {
            "id": given.id, "name": given.name, "arguments": given.arguments
        }  # fmt: skip
    else:
        function = given.get("function") if isinstance(given, Mapping) else None
        if not isinstance(function, Mapping) or given.get("type", "function") != "function":
            raise TypeError(
                f"{place} is not allowed: its tool call {quoted(given)} is neither a ToolCall nor "
                '{"id": "…", "type": "function", "function": {"name": "…", "arguments": "…"}}'
            )
        values = {
            "id": given.get("id") or "",
            "name": function.get("name"),
            "arguments": function.get("arguments", "{}"),
        }
    if isinstance(values["arguments"], Mapping):
        values["arguments"] = _json_object("arguments", values["arguments"])
    for key, value in values.items():
        if not isinstance(value, str):
            raise TypeError(f"{place} has a tool call whose {key} is {quoted(value)}, not a string")
        assign_field(call, key, value)


def _list(name: str, value: Any) -> Sequence[Any]:
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise TypeError(f"{name} is {quoted(value)}; allowed: a list")
    return value


def _json_object(name: str, value: Any) -> str:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is {quoted(value)}; allowed: a mapping")
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is {quoted(value)}: {error}") from None
