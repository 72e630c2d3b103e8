"""Builds protobuf requests from Python arguments, for both clients.

An argument that is not given stays unset in the message, so that the server's default (the model's
generation_config) applies. The server validates values; here only types are checked, because a
protobuf field holds no other type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from protos import inference_pb2


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; `role` is one of the model's chat template: system, user,
    assistant, tool."""

    role: str
    content: str


Chat = Sequence[ChatMessage | Mapping[str, str]]
Prompt = str | Sequence[int] | Chat


class SamplingOptions(TypedDict, total=False):
    """The keyword arguments of `generate`; protos/inference.proto gives ranges and neutral values.

    None means not given. At most one of the last five may be given: they constrain the output.
    `json_schema` is a schema as text or as a dict; `choice` lists the possible answers. The server
    refuses by name whatever it does not support yet.
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    max_tokens: int | None
    min_tokens: int | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[str] | None
    seed: int | None
    n: int | None
    beam_width: int | None
    length_penalty: float | None
    early_stopping: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    skip_special_tokens: bool | None
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    grammar: str | None
    json_object: bool | None
    choice: Sequence[str] | None


_M = TypeVar("_M", bound=Message)
_MAX_QUOTED: Final = 100  # characters of a value quoted in an error
_INTEGER_RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_CONSTRAINTS: Final = ("json_schema", "regex", "grammar", "json_object", "choice")


def generate_request(
    prompt: Prompt,
    options: SamplingOptions,
    *,
    request_id: str = "",
    priority: int | None = None,
    cache_salt: str = "",
    stream: bool = True,
) -> inference_pb2.GenerateRequest:
    """The message of one `generate` call. TypeError or ValueError if an argument does not fit."""
    request = message(
        inference_pb2.GenerateRequest,
        request_id=request_id,
        cache_salt=cache_salt,
        priority=priority,
        stream=None if stream else False,
    )
    request.sampling.CopyFrom(sampling_params(options))
    if isinstance(prompt, str):
        _assign_field(request, "text", prompt)
    elif _is_chat(prompt):
        request.chat.CopyFrom(chat_messages(prompt))  # type: ignore[arg-type]
    else:
        request.tokens.SetInParent()  # an empty list is sent too: the server refuses it by name
        _assign("prompt", request.tokens.ids.extend, prompt)
    return request


def message(kind: type[_M], **values: Any) -> _M:
    """A message with the given fields; a field that is None stays unset."""
    built = kind()
    for name, value in values.items():
        if value is None:
            continue
        if hasattr(field := getattr(built, name), "extend"):
            _assign(name, field.extend, value)
        else:
            _assign_field(built, name, value)
    return built


def tokenize_request(
    prompt: str | Chat, add_special_tokens: bool | None
) -> inference_pb2.TokenizeRequest:
    """The message of one `tokenize` call."""
    request = inference_pb2.TokenizeRequest(add_special_tokens=add_special_tokens)
    if isinstance(prompt, str):
        _assign_field(request, "text", prompt)
    else:
        request.chat.CopyFrom(chat_messages(prompt))
    return request


def sampling_params(options: SamplingOptions) -> inference_pb2.SamplingParams:
    """The message for `options`. TypeError for an unknown one, ValueError for two constraints."""
    given = {name: value for name, value in options.items() if value is not None}
    unknown = sorted(given.keys() - SamplingOptions.__annotations__.keys())
    if unknown:
        raise TypeError(
            f"unknown sampling option {unknown[0]!r}; known: "
            f"{', '.join(SamplingOptions.__annotations__)}"
        )
    constraints = [name for name in _CONSTRAINTS if name in given]
    if len(constraints) > 1:
        raise ValueError(f"{' and '.join(constraints)} are both given; allowed: at most one")
    params = inference_pb2.SamplingParams()
    for name, value in given.items():
        _set(params, name, value)
    return params


def chat_messages(chat: Chat) -> inference_pb2.ChatMessages:
    """The message for turns given as ChatMessage, or as mappings with exactly role and content."""
    messages = inference_pb2.ChatMessages()
    for index, message in enumerate(chat):
        if isinstance(message, ChatMessage):
            role, content = message.role, message.content
        elif isinstance(message, Mapping) and message.keys() == {"role", "content"}:
            role, content = message["role"], message["content"]
        else:
            raise TypeError(
                f"chat message {index} is {message!r}; allowed: a ChatMessage or a mapping "
                "with the keys role and content"
            )
        if not isinstance(role, str) or not isinstance(content, str):
            raise TypeError(
                f"chat message {index} is {message!r}; role and content must be strings"
            )
        added = messages.messages.add()
        _assign_field(added, "role", role)
        _assign_field(added, "content", content)
    return messages


def as_dict(message: Message) -> dict[str, Any]:
    """All fields of a message by their protobuf names, unset ones with their defaults."""
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _is_chat(prompt: Sequence[Any]) -> bool:
    return len(prompt) > 0 and isinstance(prompt[0], ChatMessage | Mapping)


def _set(params: inference_pb2.SamplingParams, name: str, value: Any) -> None:
    if name == "json_schema" and isinstance(value, Mapping):
        params.json_schema = json.dumps(value)
    elif name == "choice":
        params.choice.SetInParent()
        _assign(name, params.choice.options.extend, value)
    elif name == "stop":
        _assign(name, params.stop.extend, [value] if isinstance(value, str) else value)
    elif name in ("stop_token_ids", "bad_words"):
        if isinstance(value, str):
            raise TypeError(f"{name} is {value!r}; allowed: a list")
        _assign(name, getattr(params, name).extend, value)
    elif name == "logit_bias":
        _assign(name, params.logit_bias.update, value)
    else:
        _assign_field(params, name, value)


def _assign_field(message: Message, name: str, value: Any) -> None:
    field = message.DESCRIPTOR.fields_by_name[name]
    _assign(name, lambda given: setattr(message, name, given), value, field.cpp_type)


def _assign(name: str, assign: Any, value: Any, cpp_type: int | None = None) -> None:
    """Names argument, value and range in the error; protobuf's own messages do not."""
    try:
        assign(value)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is {_quoted(value)}: character {error.start} is half a surrogate pair; "
            "allowed: text that UTF-8 can encode"
        ) from None
    except ValueError as error:
        limits = _INTEGER_RANGES.get(cpp_type) if cpp_type is not None else None
        if limits is not None:
            allowed = f"allowed: an integer from {limits[0]} to {limits[1]}"
            raise ValueError(f"{name} is {_quoted(value)}; {allowed}") from None
        raise ValueError(f"{name} is {_quoted(value)}: {error}") from None
    except TypeError as error:
        raise TypeError(f"{name} is {_quoted(value)}: {error}") from None


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…"
