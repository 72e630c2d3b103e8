"""Turns a client's ChatMessages into what a template reads: messages as OpenAI's API has them.

Owns the checks of their form; roles, and what a message of each may have, are the template's.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, Final

from protos import inference_pb2 as pb
from scheduler_svc.errors import RequestRejected
from scheduler_svc.text.chat_template import Chat
from scheduler_svc.text.control_tokens import strings_in
from scheduler_svc.text.prompt_length import TokenLimit

# A template may build a control token from these texts and its own.
ROLE: Final = re.compile(r"[\w .-]{0,64}")
NAME: Final = re.compile(r"[\w .:/@#+-]{0,256}")
MAX_TOOLS: Final = 128  # defined, or called in one message
MAX_JSON_CHARS: Final = 1 << 18  # of one text
MAX_ALL_JSON_CHARS: Final = 1 << 21  # of all in a chat: a second's work
MAX_JSON_DEPTH: Final = 64
SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


def chat_of(asked: pb.ChatMessages, limit: TokenLimit) -> Chat:
    """Raises RequestRejected. `limit` bounds the number of messages and of their parts."""
    if not asked.messages:
        raise RequestRejected("chat.messages", [], "at least one message")
    count = sum(1 + len(message.parts) for message in asked.messages)
    if count > limit.tokens:
        raise RequestRejected(
            "length of chat.messages", count, f"at most {limit.tokens}{limit.reason}"
        )
    continues = asked.continue_final_message
    if continues and asked.add_generation_prompt:
        raise RequestRejected(
            "chat.add_generation_prompt", True, "false or unset with continue_final_message"
        )
    is_prompted = asked.add_generation_prompt or not asked.HasField("add_generation_prompt")
    _check_count("chat.tools", asked.tools)
    _check_json_length(asked)
    variables = {}
    if asked.chat_template_kwargs:
        variables = _object("chat.chat_template_kwargs", asked.chat_template_kwargs)
    return Chat(
        [_message(f"chat.messages[{i}]", message) for i, message in enumerate(asked.messages)],
        [_object(f"chat.tools[{i}]", tool) for i, tool in enumerate(asked.tools)] or None,
        variables,
        add_generation_prompt=is_prompted and not continues,
        continue_final_message=continues,
    )


def _message(field: str, message: pb.ChatMessage) -> dict[str, Any]:
    if ROLE.fullmatch(message.role) is None:
        raise RequestRejected(
            f"{field}.role",
            message.role,
            "up to 64 letters, digits, spaces, '_', '-' and '.'; the model's chat template "
            "defines the roles",
        )
    if message.content and message.parts:
        raise RequestRejected(f"{field}.content", message.content, "empty beside parts")
    parts = [{"type": "text", "text": part.text} for part in message.parts]
    read: dict[str, Any] = {"role": message.role, "content": parts or message.content}
    for name in ("name", "tool_call_id"):
        if value := getattr(message, name):
            read[name] = _name(f"{field}.{name}", value)
    if message.reasoning_content:
        read["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        _check_count(f"{field}.tool_calls", message.tool_calls)
        read["tool_calls"] = [
            _tool_call(f"{field}.tool_calls[{i}]", call)
            for i, call in enumerate(message.tool_calls)
        ]
    return read


def _tool_call(field: str, call: pb.ToolCall) -> dict[str, Any]:
    function = {
        "name": _name(f"{field}.name", call.name),
        # transformers' templates take an object, where OpenAI's API has its text
        "arguments": _object(f"{field}.arguments", call.arguments) if call.arguments else {},
    }
    identity = {"id": _name(f"{field}.id", call.id)} if call.id else {}
    return {**identity, "type": "function", "function": function}


def _name(field: str, name: str) -> str:
    if NAME.fullmatch(name) is None:
        allowed = "up to 256 letters, digits, spaces and characters of '_.:/@#+-'"
        raise RequestRejected(field, name, allowed)
    return name


def _check_count(field: str, items: Any) -> None:
    if len(items) > MAX_TOOLS:
        raise RequestRejected(f"number of {field}", len(items), f"at most {MAX_TOOLS}")


def _check_json_length(asked: pb.ChatMessages) -> None:
    calls = (call.arguments for message in asked.messages for call in message.tool_calls)
    num_chars = sum(map(len, (*asked.tools, asked.chat_template_kwargs, *calls)))
    if num_chars > MAX_ALL_JSON_CHARS:
        raise RequestRejected(
            "length of all tools, arguments and chat_template_kwargs in characters",
            num_chars,
            f"at most {MAX_ALL_JSON_CHARS}",
        )


def _object(field: str, text: str) -> dict[str, Any]:
    """A JSON object that a template can write again."""
    if len(text) > MAX_JSON_CHARS:
        raise RequestRejected(
            f"length of {field} in characters", len(text), f"at most {MAX_JSON_CHARS}"
        )
    try:
        read = json.loads(text, parse_constant=_refuse_constant)
        if not isinstance(read, dict):
            raise ValueError("it is none")
        _check_depth(read)
        if SURROGATE.search(text):
            for string in strings_in(read):
                string.encode()  # half of a character is no text
    except (ValueError, RecursionError) as error:
        raise RequestRejected(field, text, f"a JSON object ({error})") from None
    return read


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _check_depth(value: object) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        items = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for item in itertools.chain(*items) if isinstance(item, dict | list)]
        if not level:
            return
    raise ValueError(f"it is nested more than {MAX_JSON_DEPTH} deep")
